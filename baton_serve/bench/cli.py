"""`baton-bench NAME …`: one benchmark a file, imported only when it is asked for."""

import importlib
import signal
import sys

BENCHES = {
    "serve": (
        "serving.serve",
        "load on any OpenAI-compatible server: TTFT, TPOT, ITL, goodput (as `vllm bench serve`)",
    ),
    "replay": ("serving.replay", "a public trace, times and lengths scaled, against a server or simulated instances"),
    "plan": (
        "simulation.plan",
        "a trace over simulated instances: placement policies, sizes of pools, autoscaling",
    ),
    "index": ("micro.block_index", "the router's index of cached blocks: matching, memory, events"),
    "kv": ("transfer.hosts", "block transfer between two processes, every transport"),
    "kv-device": ("transfer.devices", "block transfer between two accelerators, every transport"),
    "kv-ladder": ("transfer.ladder", "how two accelerators come to their transport, while handoffs run"),
    "kv-profile": ("transfer.profile", "processor time of block transfers between two processes, by thread"),
    "handoff": ("serving.handoff", "what a handoff adds between a short prompt's first and second token, on this CPU"),
    "engine": ("micro.engine", "prefill and decode of a model's shape, no server: against this machine's limits"),
    "kernels": ("micro.kernels", "the kernels of a decode step on an accelerator, and its waits before each"),
    "load": ("micro.weight_loading", "a checkpoint's weights onto the device: against a plain read of the same files"),
    "pooling": ("micro.pooling", "embeddings of texts of mixed lengths, no server: against Sentence Transformers"),
    "ready": ("serving.ready", "`baton serve` from the command to ready, by stages: against an import of torch alone"),
    "router": (
        "router.load",
        "the router alone, with instances faked at its ZeroMQ side: requests/s, tokens/s, latency",
    ),
    "chaos": ("serving.chaos", "streams while processes are killed and frozen: all end equal, nothing is left"),
    "grammar": ("micro.grammar", "structured output: time to compile a grammar and to make each token's mask"),
    "peers": ("serving.peers", "the same load on Baton and on other servers: vLLM, llama.cpp, OpenVINO, transformers"),
    "pd": ("serving.pd", "one prefill and one decode instance against two unified ones, over a trace"),
    "pd-cpu": ("serving.pd_cpu", "one prefill and one decode instance against one unified one, on the same cores"),
    "attention-cpu": ("micro.attention_cpu", "paged attention on this CPU against memory bandwidth and SDPA"),
    "attention-gpu": ("micro.attention_gpu", "paged attention on an accelerator"),
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
        importlib.import_module(f"baton_serve.bench.{BENCHES[name][0]}").run(arguments)
    except Exception as exc:
        # The errors of an engine that was built need no traceback: their messages say what to do.
        errors = sys.modules.get("baton_serve.engine.errors")
        if errors is None or not isinstance(exc, errors.EngineError):
            raise
        sys.exit(f"baton-bench {name}: {exc}")
