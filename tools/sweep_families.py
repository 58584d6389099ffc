#!/usr/bin/env python3
"""Serve a tiny random model of every causal decoder of the installed transformers, and compare it with transformers.

    python -m tools.sweep_families                 all families; the result replaces tools/model_verdicts.json
    python -m tools.sweep_families llama phimoe    some families, whose verdicts are replaced in it
    python -m tools.sweep_families --ranks         families that are equal, on two ranks and on two pipeline stages
    python -m tools.sweep_families --wide          the same on four ranks, three stages, and two stages of two ranks

`make sweep` runs it in at most 20 minutes on two cores. Each family runs in a process of its own, forked from one that
has imported torch and transformers, with one thread and a time limit. `tools/models_page.py` generates
docs/reference/models.md from the result, and tests/structure/test_model_verdicts.py checks that it has every family.
"""

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import torch
import transformers

from baton_serve.engine import LLM, EngineConfig, SamplingParams
from baton_serve.engine.errors import ConfigError, EngineError, UnsupportedModelError
from baton_serve.engine.loading.layer_probe import PLAIN_LAYERS, STATE_LAYERS
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.loading.unsupported_models import refuse_type
from baton_serve.engine.model import fused_layers
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.vision.text_part import BIDIRECTIONAL_TYPES
from tools.model_verdicts import VERDICTS, Verdict, Verdicts, generating_families, read_verdicts, write_verdicts
from tools.tiny_families import PROMPT_TOKENS, VOCAB_SIZE, write_family

FAMILY_TIMEOUT_S = 120.0
"""Longest time for one family, of which most need three to eight seconds."""
ANSWER_TOKENS = 8
CHUNK_TOKENS = 23
"""Tokens of a step: an odd number, so that chunks of prompts end within blocks and within windows."""
LARGEST_DIFFERENCE = 2e-3
"""Largest difference of a token's logprob from transformers', of which float32 explains about a hundredth."""


class Family(NamedTuple):
    """A model type of transformers, and its class for text generation."""

    model_type: str
    model_class: str


def judge(family: Family, folder: Path) -> Verdict:
    """Return the verdict of a family, with its window if it has one."""
    verdict = judge_config(family, folder / "default", has_window=False)
    if verdict.verdict in ("equal", "different"):
        other = judge_config(family, folder / "window", has_window=True)
        if other is not NO_WINDOW:
            verdict = msgspec.structs.replace(verdict, window=other.verdict)
            if other.verdict not in ("equal", "refused"):
                return msgspec.structs.replace(verdict, verdict=other.verdict, why=f"with a window: {other.why}")
    return verdict


NO_WINDOW = Verdict("not built", "the config has no window that is switched off")


def judge_config(family: Family, folder: Path, *, has_window: bool) -> Verdict:
    """Return the verdict of one config of a family."""
    if family.model_type == "whisper":
        why = "reads audio, which the sweep does not make: tests/engine/test_speech.py compares it with transformers"
        return Verdict("not built", f"{family.model_class} {why}", family.model_class)
    if refusal := refused_by_type(family):
        return refusal
    try:
        reference = write_family(family.model_type, family.model_class, folder, has_window=has_window)
    # Whatever the class of any author raises is the reason why it cannot be built.
    except Exception as exc:  # noqa: BLE001 - whatever is raised becomes the verdict
        return Verdict("not built", described(exc), family.model_class)
    if reference is None:
        return NO_WINDOW
    try:
        llm = tiny_llm(folder)
    except EngineError as exc:
        return Verdict("refused", str(exc).replace(str(folder), "FOLDER"), family.model_class)
    except Exception as exc:  # noqa: BLE001 - whatever is raised becomes the verdict
        return Verdict("crash", described(exc), family.model_class)
    with llm:
        model = load_again(folder)
        layers = "fused" if fused_layers.fits(model.module) else "transformers"
        verdict = Verdict("equal", "", family.model_class, layers, attention_kinds(model))
        try:
            found = compare(llm, with_head(reference))
        except Exception as exc:  # noqa: BLE001 - whatever is raised becomes the verdict
            return msgspec.structs.replace(verdict, verdict="crash", why=described(exc))
        if found:
            return msgspec.structs.replace(verdict, verdict="different", why="; ".join(found))
        return verdict


DIVISIONS = {"ranks": (2, 1), "stages": (1, 2)}
"""The numbers of ranks and of stages of two processes that divide a model, by field of `Verdict`."""
WIDE = {"4 ranks": (4, 1), "3 stages": (1, 3), "2 stages of 2 ranks": (2, 2)}
"""The same of more processes, by key of `Verdict.wide`."""


def judge_divided(family: Family, folder: Path, verdict: Verdict, *, is_wide: bool) -> Verdict:
    """Return the `verdict` of a family that is equal on one device, with those on two ranks and on two stages, or if
    `is_wide` on more processes."""
    reference = with_head(write_family(family.model_type, family.model_class, folder, has_window=False))
    found: dict[str, str] = {}
    reasons: list[str] = []
    for name, (ranks, stages) in (WIDE if is_wide else DIVISIONS).items():
        found[name], why = judge_division(folder, reference, ranks, stages)
        if why:
            reasons.append(why)
    why = "; ".join(dict.fromkeys(reasons))
    if is_wide:
        return msgspec.structs.replace(verdict, wide=found, why_wide=why)
    return msgspec.structs.replace(verdict, **found, why_divided=why)


def judge_division(folder: Path, reference: Any, ranks: int, stages: int) -> tuple[str, str]:
    """Return the verdict of a model that is divided over stages with some ranks each, and the reason."""
    setting = f"{ranks} ranks, {stages} stages"
    try:
        llm = tiny_llm(folder, tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    except (ConfigError, UnsupportedModelError) as exc:
        return "refused", str(exc).replace(str(folder), "FOLDER")
    except Exception as exc:  # noqa: BLE001 - whatever is raised becomes the verdict
        return "crash", f"{setting}: {described(exc)}"
    with llm:
        try:
            differences = compare(llm, reference, calls=[prompts()[0][: 4 if ranks * stages == 2 else 3]])
        except Exception as exc:  # noqa: BLE001 - whatever is raised becomes the verdict
            return "crash", f"{setting}: {described(exc)}"
    return ("different", f"{setting}: " + "; ".join(differences)) if differences else ("equal", "")


def tiny_llm(folder: Path, **settings: Any) -> LLM:
    """Return an engine of a tiny model, whose steps end at odd places if they need not compute whole prompts."""
    stated = msgspec.json.decode((folder / "config.json").read_bytes())
    return LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=None if stated.get("model_type") in BIDIRECTIONAL_TYPES else CHUNK_TOKENS,
        kv_cache_memory_bytes=64 << 20,
        **settings,
    )


def refused_by_type(family: Family) -> Verdict | None:
    """Return the refusal of a family whose type alone is the reason; None if there is none."""
    try:
        refuse_type(SimpleNamespace(model_type=family.model_type, architectures=[family.model_class]))
    except EngineError as exc:
        return Verdict("refused", str(exc), family.model_class)
    return None


def described(exc: BaseException) -> str:
    """Return an error's type and first line."""
    lines = str(exc).strip().splitlines()
    return f"{type(exc).__name__}: {lines[0][:200] if lines else ''}"


def prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts for a first and a second call; one of the second repeats 90 tokens of the first call."""
    draw = torch.Generator().manual_seed(5)
    first = [torch.randint(*PROMPT_TOKENS, (length,), generator=draw).tolist() for length in (5, 37, 100, 131)]
    return first, [first[3][:90] + first[1], first[2]]


def with_head(reference: Any) -> Any:
    """Return the decoder of a multimodal model if it has the head, or else the model itself.

    transformers' own wrapper of Llama 4 raises an error for prompts of text.
    """
    decoder = getattr(reference, "language_model", None)
    return decoder if hasattr(decoder, "lm_head") else reference


@torch.inference_mode()
def compare(llm: LLM, reference: Any, calls: Sequence[list[list[int]]] | None = None) -> list[str]:
    """Return what differs from transformers: answers, or the logprobs of their tokens. `calls` are the prompts of each
    call; None: all of `prompts`."""
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=1)
    found: list[str] = []
    for call in calls or prompts():
        outputs = llm.generate(prompt_token_ids=call, sampling_params=greedy, use_tqdm=False)
        for prompt, output in zip(call, outputs, strict=True):
            found += differences(reference, prompt, output.outputs[0])
    return found


def differences(reference: Any, prompt: list[int], answer: Any) -> list[str]:
    """Return what differs between one answer of the engine and that of transformers."""
    ids = torch.tensor([prompt])
    expected: list[int] = []
    # Zeros say that the prompt is seen in both directions. The processor adds them, which the sweep does not call.
    is_bidirectional = reference.config.model_type in BIDIRECTIONAL_TYPES
    kinds = {"token_type_ids": torch.zeros_like(ids)} if is_bidirectional else {}
    # Caches of transformers lose the window of some families, whose answers without a cache are right.
    for use_cache in (True, False):
        found = reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **kinds,
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        expected = found.sequences[0, len(prompt) :].tolist()
        if list(answer.token_ids) == expected:
            break
    else:
        return [f"answer to {len(prompt)} tokens: {list(answer.token_ids)} instead of {expected}"]
    # Those of the same steps: one pass over all tokens may choose other experts where two are nearly equal.
    logprobs = torch.log_softmax(torch.cat(found.logits)[:, :VOCAB_SIZE].float(), -1)
    apart = max(
        abs(float(logprobs[at, token]) - entry[token].logprob)
        for at, (token, entry) in enumerate(zip(expected, answer.logprobs, strict=True))
    )
    # Written so that NaN is a difference too.
    if not apart <= LARGEST_DIFFERENCE:
        return [f"logprobs of the answer to {len(prompt)} tokens are {apart:.4f} apart"]
    return []


def load_again(folder: Path) -> LoadedModel:
    """Load a family as transformers' module, to see its layers and its attention."""
    settings = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_model_len=256)
    return load_model(settings, torch.device("cpu"), lambda what, fraction: None)


WORDS = {"softcap": "soft cap", "sinks": "sinks", "alibi": "ALiBi"}
"""Kinds of attention by field of `AttentionSpec`."""


def attention_kinds(model: LoadedModel) -> str:
    """Return the kinds of attention of a model, for the table."""
    types = set(getattr(cast(Any, model.module).config.get_text_config(), "layer_types", None) or ["full_attention"])
    if types <= STATE_LAYERS | PLAIN_LAYERS:
        return "none"
    kinds = ["latent (MLA)"] if any(shape.num_planes == 1 for shape in model.kv_shapes) else []
    kinds += [] if model.is_uniform else ["KV shapes that differ by layer"]
    kinds += ["layers that share KV"] if model.shared_layers else []
    specs = model.specs + [shared.spec for shared in model.shared_layers]
    if any(spec.sliding_window is not None for spec in specs):
        everywhere = all(spec.sliding_window is not None for spec in specs)
        kinds.append("sliding window" if everywhere else "sliding window in some layers")
    kinds += ["chunked in some layers"] if any(spec.chunk is not None for spec in specs) else []
    kinds += [word for field, word in WORDS.items() if any(getattr(spec, field) is not None for spec in specs)]
    return ", ".join(kinds) or "full"


def run_alone(family: Family, known: Verdict | None, *, is_wide: bool = False) -> Verdict:
    """Judge a family in a forked process, which is killed after `FAMILY_TIMEOUT_S`. `known` is its verdict on one
    device, to which those on two are added, or on more if `is_wide`; None: judge it on one device."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(family, known, is_wide, writer))
    process.start()
    writer.close()
    try:
        if not reader.poll(FAMILY_TIMEOUT_S):
            return failed(family, known, f"no result within {FAMILY_TIMEOUT_S:.0f} s", is_wide=is_wide)
        return msgspec.json.decode(reader.recv_bytes(), type=Verdict)
    except EOFError:
        process.join(10)
        return failed(family, known, f"the process ended with {process.exitcode}", is_wide=is_wide)
    finally:
        process.kill()
        process.join()
        reader.close()


def failed(family: Family, known: Verdict | None, why: str, *, is_wide: bool) -> Verdict:
    """Return the verdict of a family whose process has sent none."""
    if known is None:
        return Verdict("crash", why, family.model_class)
    if is_wide:
        return msgspec.structs.replace(known, wide=dict.fromkeys(WIDE, "crash"), why_wide=why)
    return msgspec.structs.replace(known, ranks="crash", stages="crash", why_divided=why)


def _child(family: Family, known: Verdict | None, is_wide: bool, writer: Connection) -> None:
    """Judge a family and send the verdict, without output of the libraries."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="sweep") as folder:
        if known is None:
            verdict = judge(family, Path(folder))
        else:
            # The other ranks are forks of a server that has imported torch; see `main`.
            importlib.import_module("tests.forked_ranks")
            verdict = judge_divided(family, Path(folder), known, is_wide=is_wide)
        writer.send_bytes(msgspec.json.encode(verdict))


def sweep(
    chosen: list[Family], workers: int, known: Mapping[str, Verdict] | None = None, *, is_wide: bool = False
) -> Iterator[tuple[str, Verdict]]:
    """Judge families, `workers` at a time. Print and yield each verdict with its model type. `known` are their verdicts
    on one device, to which those on two are added, or on more if `is_wide`; None: judge them on one."""

    def one(family: Family) -> tuple[str, Verdict]:
        start = time.monotonic()
        verdict = run_alone(family, None if known is None else known[family.model_type], is_wide=is_wide)
        took = time.monotonic() - start
        kinds = " ".join([verdict.verdict, verdict.ranks, verdict.stages, *(verdict.wide.values() if is_wide else ())])
        why = f"{verdict.window} {verdict.why} {verdict.why_wide if is_wide else verdict.why_divided}"
        print(f"{family.model_type:<28}{kinds:<24}{took:5.1f} s  {why}", flush=True)
        return family.model_type, verdict

    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help="model types of transformers; default: all")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--ranks", action="store_true", help="compare equal families on two ranks and on two stages")
    parser.add_argument("--wide", action="store_true", help="compare equal families on three and four processes")
    asked = parser.parse_args()
    families = generating_families()
    chosen = [Family(kind, families[kind]) for kind in asked.families or families if kind in families]
    known = read_verdicts().families
    if asked.ranks or asked.wide:
        # Before the first fork, so that all share it.
        importlib.import_module("tests.forking").forks()
        chosen = [one for one in chosen if one.model_type in known and known[one.model_type].verdict == "equal"]
        verdicts = {}
        for kind, verdict in sweep(chosen, asked.workers, known, is_wide=asked.wide):
            verdicts[kind] = verdict
            # Another sweep may have written meanwhile, and this one may be ended before its last family.
            keep(read_verdicts().families | {kind: verdict})
        divided = [v.wide.values() if asked.wide else (v.ranks, v.stages) for v in verdicts.values()]
        counts = {kind: sum(kind in found for found in divided) for kind in VERDICTS}
    else:
        # A family keeps its verdicts on several devices until they are compared again.
        verdicts = {kind: with_divisions(verdict, known.get(kind)) for kind, verdict in sweep(chosen, asked.workers)}
        keep((read_verdicts().families if asked.families else {}) | verdicts)
        counts = {kind: sum(v.verdict == kind for v in verdicts.values()) for kind in VERDICTS}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["different"] or counts["crash"] else 0


def keep(families: Mapping[str, Verdict]) -> None:
    """Replace the stored verdicts by those of `families`."""
    write_verdicts(Verdicts(transformers.__version__, dict(sorted(families.items()))))


def with_divisions(verdict: Verdict, known: Verdict | None) -> Verdict:
    """Return a family's verdict on one device, with the `known` ones on several if both are about equal answers."""
    if known is None or verdict.verdict != "equal":
        return verdict
    kept = ("ranks", "stages", "why_divided", "wide", "why_wide")
    return msgspec.structs.replace(verdict, **{field: getattr(known, field) for field in kept})


if __name__ == "__main__":
    sys.exit(main())
