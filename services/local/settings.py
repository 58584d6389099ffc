"""Settings of `baton serve` itself, of `baton chat` and of `baton complete`.

`baton serve` also accepts the options of the router and of instances and passes them on.
"""

from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from baton_serve.services.common.settings.shared_settings import Host, ModelSourceSettings, Port
from baton_serve.services.local.pools import DEFAULT_POOLS, Count

DEMO_MODEL = Path(__file__).parent / "demo_model"
DEMO_NAME = "baton-demo"


class ServeSettings(ModelSourceSettings, frozen=True, kw_only=True):
    """The settings of `baton serve` itself: the model, the numbers of instances and the address of a local cluster."""

    EVERYDAY: ClassVar = (
        "model", "prefill", "decode", "port", "host", "served_model_name", "max_model_len", "quantization",
        "gpu_memory_utilization", "api_key",
    )  # fmt: skip
    """The options that `--help` shows first."""
    ACCEPTS_VLLM: ClassVar = True

    model: Annotated[
        str,
        Meta(
            description="folder of a Hugging Face model, GGUF file, or ORG/NAME of a model on the hub, which is"
            " downloaded if it is not in the cache (default: the bundled demo model)",
            extra={"group": "cluster", "positional": True},
        ),
    ] = ""
    prefill: Annotated[
        Count, Meta(description="number of prefill workers, which compute prompts and hand off their KV blocks")
    ] = DEFAULT_POOLS["prefill"]
    decode: Annotated[
        Count,
        Meta(description="number of decode workers, which generate tokens (0 for embedding and reranking models)"),
    ] = DEFAULT_POOLS["decode"]
    unified: Annotated[
        Count,
        Meta(description="number of workers that do both, without a handoff"),
    ] = DEFAULT_POOLS["unified"]
    encode: Annotated[
        Count, Meta(description="number of encode workers, which only encode images, videos and audio for others")
    ] = DEFAULT_POOLS["encode"]
    data_parallel_size: Annotated[
        int,
        Meta(
            description="number of replicas: multiplies --prefill, --decode, --unified and --encode",
            ge=1,
            le=1024,
            extra={"aliases": ["-dp", "--dp"]},
        ),
    ] = 1
    host: Annotated[Host, Meta(description="address that the router listens on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port that the router listens on; 0 takes a free one")] = 8000
    threads: Annotated[
        int | None,
        Meta(description="CPU threads of each instance (default: the cores are divided among the instances)", ge=1),
    ] = None
    start_timeout_s: Annotated[
        float, Meta(description="longest time until all instances are ready; then baton serve stops", gt=0)
    ] = 1800.0


class CompletionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `baton complete`: the server, and the requests that it gets. The names are those of `vllm
    complete`.
    """

    model: Annotated[
        str,
        Meta(
            description="start a cluster for this model, as baton serve does, and stop it at the end; options of"
            " baton serve may follow after -- (default: use the running server at --url)",
            extra={"group": "requests", "positional": True},
        ),
    ] = ""
    url: Annotated[str, Meta(description="URL of the running server")] = "http://127.0.0.1:8000"
    model_name: Annotated[
        str | None, Meta(description="model that answers (default: the first one that the server lists)")
    ] = None
    api_key: Annotated[
        str | None, Meta(description="API key of the server (default: VLLM_API_KEY, else OPENAI_API_KEY)")
    ] = None
    quick: Annotated[
        str | None, Meta(description="send this one message, print the answer and exit", extra={"aliases": ["-q"]})
    ] = None
    max_tokens: Annotated[
        int | None, Meta(description="largest number of tokens of an answer (default: the server's)", ge=1)
    ] = None
    temperature: Annotated[
        float | None, Meta(description="sampling temperature; 0 is greedy (default: the server's)", ge=0)
    ] = None


class ChatSettings(CompletionSettings, frozen=True, kw_only=True):
    """The settings of `baton chat`: the server, and the requests that it gets. The names are those of `vllm chat`."""

    system_prompt: Annotated[
        str | None,
        Meta(description="text that the conversation begins with, in the role system", extra={"group": "requests"}),
    ] = None


class RunBatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `baton run-batch`: the files and the server. The names are those of `vllm run-batch`."""

    model: Annotated[
        str,
        Meta(
            description="start a cluster for this model, as baton serve does, and stop it at the end; options of"
            " baton serve may follow after -- (default: use the running server at --url)",
            extra={"group": "batch", "positional": True},
        ),
    ] = ""
    input_file: Annotated[
        str, Meta(description="JSONL file with the requests", min_length=1, extra={"aliases": ["-i"]})
    ]
    output_file: Annotated[
        str,
        Meta(
            description="file that gets the answers, in the order in which they come",
            min_length=1,
            extra={"aliases": ["-o"]},
        ),
    ]
    url: Annotated[str, Meta(description="URL of the running server")] = "http://127.0.0.1:8000"
    api_key: Annotated[
        str | None, Meta(description="API key of the server (default: VLLM_API_KEY, else OPENAI_API_KEY)")
    ] = None
    max_concurrency: Annotated[int, Meta(description="largest number of requests at once", ge=1, le=4096)] = 256
