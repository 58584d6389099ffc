"""The command `baton-bench NAME …`. Each benchmark is one module, imported only when it is run."""

import importlib
import signal
import sys

BENCHES = {
    "serve": (
        "serving.serve",
        "send load to any OpenAI-compatible server: TTFT, TPOT, ITL, goodput (as `vllm bench serve`)",
    ),
    "latency": ("offline.latency", "measure the latency of one batch through `LLM` (as `vllm bench latency`)"),
    "throughput": ("offline.throughput", "measure many prompts at once through `LLM` (as `vllm bench throughput`)"),
    "accuracy": ("offline.accuracy", "check the answers to generated tasks: each format of weights and KV cache"),
    "replay": ("serving.replay", "replay a public trace, scaled, against a server or simulated instances"),
    "plan": (
        "simulation.plan",
        "simulate a cluster with a trace: placement policies, pool sizes, autoscaling",
    ),
    "index": ("micro.block_index", "measure the router's index of cached blocks: lookups, memory, events"),
    "kv": ("transfer.hosts", "measure KV block transfer between two processes, with each transport"),
    "kv-device": ("transfer.devices", "measure KV block transfer between two accelerators, with each transport"),
    "kv-ladder": ("transfer.ladder", "show how two accelerators choose their transport while handoffs run"),
    "kv-profile": ("transfer.profile", "measure the CPU time of KV block transfers between two processes, by thread"),
    "handoff": ("serving.handoff", "measure what a handoff adds between first and second token of short prompts (CPU)"),
    "engine": ("micro.engine", "measure prefill and decode without a server, against this machine's limits"),
    "kernels": ("micro.kernels", "list the kernels of a decode step on an accelerator, and the idle time before each"),
    "load": ("micro.weight_loading", "measure loading of weights, against a plain read of the same files"),
    "pooling": ("micro.pooling", "measure embeddings without a server, against Sentence Transformers"),
    "media": ("micro.media", "measure images and speech without a server: TTFT, cached images, windows of audio"),
    "ready": ("serving.ready", "measure the start of `baton serve` by stages, against an import of torch alone"),
    "router": (
        "router.load",
        "measure the router alone with fake instances: requests/s, tokens/s, latency",
    ),
    "batch": ("serving.batch", "measure live streams beside a large batch, and kill processes in its middle"),
    "chaos": (
        "chaos.run",
        "kill and freeze processes under honest and hostile load: answers must be equal, nothing may leak",
    ),
    "grammar": ("micro.grammar", "measure structured output: compilation of grammars, token masks"),
    "peers": (
        "serving.peers",
        "send the same load to Baton and other servers: vLLM, llama.cpp, OpenVINO, transformers",
    ),
    "pd": ("serving.pd", "compare one prefill and one decode instance with two unified ones, with a trace"),
    "pd-cpu": (
        "serving.pd_cpu",
        "compare one prefill and one decode instance with one unified one, on the same CPU cores",
    ),
    "encode-pool": (
        "serving.encode_pool",
        "compare one encode, prefill and decode instance with two unified ones, for chats with images",
    ),
    "long-prompt": ("serving.long_prompt", "measure running streams beside one long prompt, of a hybrid model on CPU"),
    "attention-cpu": ("micro.attention_cpu", "measure paged attention on this CPU, against memory bandwidth and SDPA"),
    "attention-gpu": ("micro.attention_gpu", "measure paged attention on an accelerator"),
    "family-kernels": (
        "micro.family_kernels",
        "measure kernels of single model families on an accelerator: Kimi-Linear, Gemma 4",
    ),
}
"""Module below `baton_serve.bench` and description of each benchmark, by its name on the command line."""


def main() -> None:
    """Run the benchmark named on the command line: the entry point of `baton-bench`."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(
            "usage: baton-bench NAME [options]   (baton-bench NAME --help: its options; --json: JSON lines)\n\n"
        )
        for name, (_, what) in BENCHES.items():
            sys.stdout.write(f"  {name:<15}{what}\n")
        return
    name, *arguments = sys.argv[1:]
    if name not in BENCHES:
        sys.exit(f"baton-bench: unknown benchmark {name!r}; choose one of {', '.join(BENCHES)}")
    # Turn SIGTERM into an exception, so that `finally` blocks stop the servers that the benchmark has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        importlib.import_module(f"baton_serve.bench.{BENCHES[name][0]}").run(arguments)
    except Exception as exc:
        # Messages of `EngineError` say what to do, so they need no traceback. The engine is not imported here,
        # because most benchmarks run without torch: if it was never loaded, the exception is none of its own.
        errors = sys.modules.get("baton_serve.engine.errors")
        if errors is None or not isinstance(exc, errors.EngineError):
            raise
        sys.exit(f"baton-bench {name}: {exc}")


if __name__ == "__main__":  # as `baton bench` starts it
    main()
