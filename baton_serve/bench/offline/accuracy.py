"""Check that answers are as right as they should be: exact match on generated tasks, against a reference value.

`baton-bench accuracy` asks the bundled model with each format of weights and KV cache, through `LLM`.

`baton-bench accuracy --base-url http://127.0.0.1:8000 --reference 0.95` asks a server.

The status is 1 if the result is lower than chance explains.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence

import httpx

from baton_serve.bench.command_line import with_dashes
from baton_serve.bench.offline.engine_flags import add_engine_flags, engine_arguments
from baton_serve.bench.offline.tasks import MAX_ANSWER_TOKENS, AccuracyTask, allowed_mistakes, exact_match, make_tasks
from baton_serve.bench.report import Row, show
from baton_serve.bench.serving.load_client import BenchTarget, drive
from baton_serve.bench.serving.workload import BenchRequest
from baton_serve.services.local.settings import DEMO_MODEL

FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    **{name: {"quantization": name} for name in ("fp8", "int8", "sym_int4", "asym_int4", "fp6", "mxfp4")},
    **{f"kv {name}": {"kv_cache_dtype": name} for name in ("fp8_e4m3", "fp8_e5m2", "int8")},
}
"""Arguments of `LLM` for each format."""
REFERENCES = dict.fromkeys(FORMATS, 1.0) | {"float32": 0.99}
"""Exact match of the bundled model on a CPU: of 400 tasks in float32 (four look-ups were wrong), of 100 in each other
format, with the seed 0."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="baton-bench accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--tasks", type=int, default=200, help="number of tasks")
    made.add_argument("--task-seed", type=int, default=0, help="seed of the tasks")
    made.add_argument(
        "--formats", nargs="+", choices=FORMATS, help="formats to check (default: all, or only that of the flags below)"
    )
    made.add_argument("--reference", type=float, help="expected exact match, 0 to 1 (default: of the bundled model)")
    made.add_argument("--base-url", help="ask this server instead of `LLM`")
    made.add_argument("--served-model-name", help="model name in requests (default: the first one of /v1/models)")
    made.add_argument("--api-key", help="API key for the server")
    made.add_argument("--max-concurrency", type=int, default=16, help="most concurrent requests to the server")
    made.add_argument("--json", action="store_true", help="print one JSON object per row")
    add_engine_flags(made)
    return made


def run(arguments: Sequence[str]) -> None:
    made = parser()
    options = made.parse_args(with_dashes(arguments))
    if wrong := _wrong(options):
        made.error(wrong)
    found = list(rows(make_tasks(options.tasks, seed=options.task_seed), options))
    show(found, as_json=options.json)
    if low := [row for row in found if not is_enough(row, options.tasks)]:
        sys.exit(
            "baton-bench accuracy: "
            + "; ".join(f"{row.case} has {row.value:.3f}, the reference is {row.limit:.3f}" for row in low)
        )


def _wrong(options: argparse.Namespace) -> str | None:
    """Return why the options contradict each other, or None."""
    if options.tasks < 1 or not 0 <= (options.reference or 0.0) <= 1:
        return "--tasks must be at least 1, and --reference from 0 to 1"
    is_other = options.base_url is not None or options.model != str(DEMO_MODEL)
    if is_other and options.reference is None:
        return "--reference is needed for a server or another model than the bundled one"
    if options.base_url is not None and options.formats:
        return "--formats and --base-url exclude each other: the server has its own format"
    return None


def is_enough(row: Row, tasks: int) -> bool:
    """Return whether the exact match of a row is plausible for its reference, which is the row's limit."""
    return row.limit is None or round((1 - row.value) * tasks) <= allowed_mistakes(tasks, row.limit)


def rows(tasks: Sequence[AccuracyTask], options: argparse.Namespace) -> Iterator[Row]:
    """Ask the server, or `LLM` in each format, and yield the exact match with its reference."""
    if options.base_url is not None:
        yield _row(options.base_url, exact_match(tasks, ask_server(tasks, options)), options.reference)
        return
    given = engine_arguments(options)
    chosen = options.formats or ([] if {"dtype", "quantization", "kv_cache_dtype"} & set(given) else list(FORMATS))
    for name in chosen:
        answers = ask_model(tasks, options, given | FORMATS[name])
        yield _row(name, exact_match(tasks, answers), _expected(options, name))
    if not chosen:
        answers = ask_model(tasks, options, given)
        yield _row("as the flags say", exact_match(tasks, answers), _expected(options, "bfloat16"))


def _expected(options: argparse.Namespace, name: str) -> float:
    reference: float | None = options.reference
    return REFERENCES[name] if reference is None else reference


def _row(case: str, value: float, reference: float) -> Row:
    return Row("accuracy", case, value, "exact match", limit=reference, ratio=value / reference if reference else None)


def ask_model(tasks: Sequence[AccuracyTask], options: argparse.Namespace, arguments: dict[str, object]) -> list[str]:
    """Return the greedy answers of a model in this process."""
    # Here because a server is asked without torch.
    from baton_serve.engine import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    with LLM(options.model, tokenizer=options.tokenizer, **arguments) as llm:
        outputs = llm.chat([[{"role": "user", "content": task.question}] for task in tasks], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def ask_server(tasks: Sequence[AccuracyTask], options: argparse.Namespace) -> list[str]:
    """Return the greedy answers of a server. Raises `SystemExit` if a request fails."""
    target = BenchTarget(
        options.base_url.rstrip("/"),
        options.served_model_name,
        "openai-chat",
        headers={"authorization": f"Bearer {options.api_key}"} if options.api_key else {},
        ignore_eos=False,
        max_concurrency=options.max_concurrency,
    )
    requests = [BenchRequest(0.0, task.question, MAX_ANSWER_TOKENS) for task in tasks]
    try:
        outcomes, _ = asyncio.run(drive(requests, target))
    except httpx.HTTPError as exc:
        raise SystemExit(f"baton-bench accuracy: {options.base_url} does not answer ({exc!r})") from exc
    if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
        raise SystemExit(f"baton-bench accuracy: {len(failed)} requests failed; the first error was {failed[0]}")
    return [outcome.text for outcome in outcomes]
