"""`baton-bench NAME …`: one benchmark a file, imported only when it is asked for."""

import importlib
import signal
import sys

BENCHES = {
    "serve": (
        "bench.serve",
        "load on any OpenAI-compatible server: TTFT, TPOT, ITL, goodput (as `vllm bench serve`)",
    ),
    "replay": ("bench.replay", "a public trace, times and lengths scaled, against a server or simulated instances"),
    "plan": (
        "bench.plan",
        "a trace over simulated instances: placement policies, sizes of pools, autoscaling",
    ),
    "index": ("bench.index", "the router's index of cached blocks: matching, memory, events"),
    "kv": ("bench.kv", "block transfer between two processes, every transport"),
    "kv-device": ("bench.kv_device", "block transfer between two accelerators, every transport"),
    "kv-ladder": ("bench.kv_ladder", "how two accelerators come to their transport, while handoffs run"),
    "kv-profile": ("bench.kv_profile", "processor time of block transfers between two processes, by thread"),
    "handoff": ("bench.handoff", "what a handoff adds between a short prompt's first and second token, on this CPU"),
    "engine": ("bench.engine", "prefill and decode of a model's shape, no server: against this machine's limits"),
    "kernels": ("bench.kernels", "the kernels of a decode step on an accelerator, and its waits before each"),
    "load": ("bench.load", "a checkpoint's weights onto the device: against a plain read of the same files"),
    "pooling": ("bench.pooling", "embeddings of texts of mixed lengths, no server: against Sentence Transformers"),
    "ready": ("bench.ready", "`baton serve` from the command to ready, by stages: against an import of torch alone"),
    "router": (
        "bench.router",
        "the router alone, with instances faked at its ZeroMQ side: requests/s, tokens/s, latency",
    ),
    "chaos": ("bench.chaos", "streams while processes are killed and frozen: all end equal, nothing is left"),
    "grammar": ("bench.grammar", "structured output: time to compile a grammar and to make each token's mask"),
    "peers": ("bench.peers", "the same load on Baton and on other servers: vLLM, llama.cpp, OpenVINO, transformers"),
    "pd": ("bench.pd", "one prefill and one decode instance against two unified ones, over a trace"),
    "pd-cpu": ("bench.pd_cpu", "one prefill and one decode instance against one unified one, on the same cores"),
    "attention-cpu": ("bench.attention_cpu", "paged attention on this CPU against memory bandwidth and SDPA"),
    "attention-gpu": ("bench.attention_gpu", "paged attention on an accelerator"),
}


def main() -> None:
    """Entry point of `baton-bench`."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.stdout.write("usage: baton-bench NAME [options]   (--help after NAME explains it; --json for programs)\n\n")
        for name, (_, what) in BENCHES.items():
            sys.stdout.write(f"  {name:<15}{what}\n")
        return
    name, *arguments = sys.argv[1:]
    if name not in BENCHES:
        sys.exit(f"baton-bench: no benchmark is named {name!r}; there are {', '.join(BENCHES)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what it has started must end too
    try:
        importlib.import_module(BENCHES[name][0]).run(arguments)
    except Exception as exc:
        errors = sys.modules.get("engine.errors")  # of an engine that was built: its messages need no traceback
        if errors is None or not isinstance(exc, errors.EngineError):
            raise
        sys.exit(f"baton-bench {name}: {exc}")
