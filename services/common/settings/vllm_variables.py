"""Maps environment variables of vLLM to settings. They count where neither a flag, a variable of Baton nor the file
sets the option.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from baton_serve.services.common.settings.options import Value

_GIB = 2**30
_LEVELS = {"DEBUG": "debug", "INFO": "info", "WARNING": "warning", "WARN": "warning", "ERROR": "error"}
# Kubernetes sets such variables for a Service whose name begins with `vllm`.
_OF_A_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)(_.*)?$|_PORT_\d+_(TCP|UDP)(_.*)?$")


@dataclass(frozen=True, slots=True)
class FromVllm:
    """The values that vLLM's environment variables set for options of Baton, by the name of the option, and sentences
    about these variables for the log.
    """

    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The variable and its text, by option."""
    notes: list[str] = field(default_factory=list)


def _mib(text: str) -> str:
    return str(int(text) << 20)


def _gib(text: str) -> str:
    # 0 is vLLM's default, with which the memory decides.
    return str(int(float(text) * _GIB)) if float(text) > 0 else ""


def _cores(text: str) -> str:
    return {"all": "auto"}.get(text, text)


def _switch(text: str) -> str:
    return "true" if text.strip().lower() in ("1", "true") else ""


def _as_it_is(text: str) -> str:
    return text


# Not HOST_IP, which older versions of vLLM read: manifests often set it to the address of the node, not of the pod.
EQUIVALENTS: Mapping[str, tuple[str, Callable[[str], str]]] = {
    "VLLM_API_KEY": ("api_key", _as_it_is),
    "VLLM_HOST_IP": ("advertise_host", _as_it_is),
    "VLLM_PORT": ("rpc_port", _as_it_is),
    "VLLM_INSTANCE_ID": ("instance_id", _as_it_is),
    "VLLM_LOGGING_CONFIG_PATH": ("log_config_file", _as_it_is),
    # Without vLLM's own configuration, Python writes warnings and errors only.
    "VLLM_CONFIGURE_LOGGING": ("log_level", lambda text: "warning" if text.strip() == "0" else ""),
    "VLLM_LOGGING_LEVEL": ("log_level", lambda text: _LEVELS.get(text.upper(), "error")),
    "VLLM_CPU_KVCACHE_SPACE": ("kv_cache_memory_bytes", _gib),
    "VLLM_CPU_OMP_THREADS_BIND": ("omp_threads_bind", _cores),
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": ("max_audio_bytes", _mib),
    "VLLM_IMAGE_FETCH_TIMEOUT": ("image_fetch_timeout_s", _as_it_is),
    "VLLM_AUDIO_FETCH_TIMEOUT": ("audio_fetch_timeout_s", _as_it_is),
    "VLLM_VIDEO_FETCH_TIMEOUT": ("video_fetch_timeout_s", _as_it_is),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": ("engine_step_timeout_s", _as_it_is),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": ("keep_alive_timeout_s", _as_it_is),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": ("allow_runtime_lora_updating", _switch),
    "VLLM_LORA_RESOLVER_CACHE_DIR": ("lora_resolver_folder", _as_it_is),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": ("allow_long_max_model_len", _switch),
    "VLLM_XPU_FP8_DTYPE": ("fp8_dtype", _as_it_is),
    "VLLM_PP_LAYER_PARTITION": ("pipeline_layer_partition", _as_it_is),
}
"""The option of Baton for each variable, and how the text becomes that of the option; "" leaves it as it is."""
_READ_ELSEWHERE = ("VLLM_USE_MODELSCOPE", "VLLM_TORCH_PROFILER_DIR", "VLLM_PLUGINS", "VLLM_CACHE_ROOT")
"""Variables that the code which needs them looks up itself."""
_REASONS = {
    "VLLM_CONFIG_ROOT": "the only settings in files are those of --config",
    "VLLM_ASSETS_CACHE": "no pictures or sounds are downloaded for tests; VLLM_CACHE_ROOT has all caches",
    "VLLM_TRACE_FUNCTION": "py-spy shows the functions of a running process",
    "VLLM_CPU_KVCACHE_SPACE": "it counts with --device cpu alone; see --kv-cache-memory-bytes",
    "VLLM_HOST_IP": "baton serve connects its processes by itself",
    "VLLM_PORT": "baton serve connects its processes by itself; --port is that of the API",
    "VLLM_ATTENTION_BACKEND": "each kind of device has one",
    "VLLM_OFFLOAD_WEIGHTS_BEFORE_QUANT": "weights are always quantized layer by layer",
}
"""Reasons why variables change nothing, or other ways to the same effect."""


def from_vllm(environ: Mapping[str, str], options: Collection[str], given: Mapping[str, Value]) -> FromVllm:
    """Return the values that vLLM's variables in `environ` set for `options`, the names of a process's options. Options
    in `given` have a value from another source, which counts.
    """
    found = FromVllm()
    idle: list[str] = []
    for variable, text in sorted(environ.items()):
        if not _is_vllm(variable, text) or variable in _READ_ELSEWHERE:
            continue
        option, convert = EQUIVALENTS.get(variable, ("", _as_it_is))
        if option in given:
            continue
        # Images set it for their CPU backend. On an accelerator it would only shrink the KV cache.
        counts = option in options and (variable != "VLLM_CPU_KVCACHE_SPACE" or given.get("device") == "cpu")
        if not counts:
            idle.append(f"{variable} ({reason})" if (reason := _REASONS.get(variable)) else variable)
        elif value := _converted(convert, text):
            found.values[option] = (variable, value)
    if found.values:
        used = (f"{variable} as --{option.replace('_', '-')}" for option, (variable, _) in found.values.items())
        found.notes.append(f"used from vLLM's environment variables: {', '.join(used)}")
    if idle:
        found.notes.append(f"without effect here: {', '.join(idle)}")
    return found


def without_vllm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environ` without the variables that `from_vllm` reads, for processes that get their values as
    flags.
    """
    return {name: text for name, text in environ.items() if name in _READ_ELSEWHERE or not name.startswith("VLLM_")}


def _is_vllm(variable: str, text: str) -> bool:
    return (
        variable.startswith("VLLM_")
        and bool(text)
        and not text.startswith(("tcp://", "udp://"))
        and _OF_A_SERVICE.search(variable) is None
    )


def _converted(convert: Callable[[str], str], text: str) -> str:
    """Return `text`, the value of a variable of vLLM, as text for Baton's option. If `convert` raises an error, return
    `text` unchanged: the option then refuses it with an error for the user.
    """
    try:
        return convert(text)
    except ValueError:
        return text
