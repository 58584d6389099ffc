"""Flags of `vllm serve` that are none of Baton's, and what to do about each: many command lines come from there."""

_ADVICE_FOR_FLAGS = (
    ("prompts are logged only with --enable-log-requests: leave it out", "--disable-log-requests"),
    (
        "numbers are at /metrics, traces with --otlp-traces-endpoint: leave it out",
        "--disable-log-stats --collect-detailed-traces",
    ),
    (
        "the engine does what is best there by itself: leave it out",
        "--enable-chunked-prefill --num-scheduler-steps --multi-step-stream-outputs --use-v2-block-manager"
        " --disable-async-output-proc --disable-frontend-multiprocessing --preemption-mode --num-lookahead-slots"
        " --scheduler-delay-factor",
    ),
    (
        "graphs are captured for every length: leave it out, or give --enforce-eager",
        "--max-seq-len-to-capture --max-context-len-to-capture",
    ),
    ("windows are as the model's config says: leave it out", "--disable-sliding-window"),
    (
        "ranks are processes of one host, without Ray: leave it out",
        "--distributed-executor-backend --worker-use-ray --engine-use-ray --ray-workers-use-nsight",
    ),
    (
        "tokenizer.json is read by the tokenizers library: leave it out",
        "--tokenizer-mode --tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config",
    ),
    ("llguidance does it: leave it out", "--guided-decoding-backend"),
    ("instances find each other by themselves; --kv-transport may force how blocks travel", "--kv-transfer-config"),
    ("give --log-level", "--uvicorn-log-level"),
    ("give --quantization (sym_int4, fp8, …)", "--load-in-low-bit"),
    (
        "the model is a folder on this machine: download that revision first",
        "--revision --code-revision --tokenizer-revision --download-dir",
    ),
    ("change the folder's config.json", "--hf-overrides --rope-scaling --rope-theta"),
    ("a model is split by --tensor-parallel-size alone", "--pipeline-parallel-size -pp"),
    ("give more instances: --prefill, --decode, --unified", "--data-parallel-size -dp"),
    ("weights stay on the device; --quantization makes them smaller", "--cpu-offload-gb"),
    ("there is no speculative decoding", "--speculative-model --num-speculative-tokens --speculative-config"),
    ("images are read as the model's own processor says: leave it out", "--mm-processor-kwargs"),
    (
        "there are no prompt adapters; --enable-lora serves low-rank ones",
        "--enable-prompt-adapter --prompt-adapters --max-prompt-adapters --max-prompt-adapter-token",
    ),
)
_BY_FLAG = {flag: text for text, flags in _ADVICE_FOR_FLAGS for flag in flags.split()}


def vllm_flag_advice(flag: str) -> str | None:
    """None: no flag of vLLM's that needs a word."""
    return _BY_FLAG.get(flag)
