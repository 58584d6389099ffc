#!/usr/bin/env python3
"""Writes docs/models.md from the families that tests compare with transformers; `--check`: is it current?"""

import contextlib
import importlib
import io
import sys
import tempfile
from pathlib import Path

import transformers

from baton_serve.engine import EngineConfig
from baton_serve.engine.model import fused
from baton_serve.engine.model.loaded_model import LoadedModel
from tests.families import FAMILIES, IN_PROCESSES, REFUSED, Family

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"

HEAD = """# Models

Made by `tools/models_page.py` from [tests/families.py](../tests/families.py): every row is a tiny random-weight model
whose greedy tokens equal those of `transformers.generate` in float32 (transformers {version} when this page was made).

* **Every family** is compared in `tests/engine/test_equality.py` (in one batch, from the prefix cache, with chunked
  prefill, another block size, preemption, replay, handoff with and without cached prefixes, two sequences of one
  request) and in `tests/e2e/test_families.py` (router → prefill → transfer → decode on real sockets); those marked ●
  also as real processes (`tests/e2e/test_equality.py`).
* **Layers**: *fused* are packed matrix products, fused norms, rotary and KV store, captured in graphs on accelerators;
  *transformers* is the model's own forward around paged attention: right, and slower at small batches.
* **Attention** is what the kernels are told. With *latent* (MLA) a block holds the latents and nothing else, as one KV
  head for all. ALiBi and latents run in C++ on CPUs; on accelerators in plain torch, which is slow.

| Models | Class | Layers | Attention | Processes |
|---|---|---|---|---|
"""

TAIL = """
## Models that read images

| Models | Class | Tower | Decoder |
|---|---|---|---|
| LLaVA 1.5, LLaVA-Interleave | `LlavaForConditionalGeneration` | CLIP, SigLIP | Llama, Mistral, Qwen 2, Qwen 3 |
| LLaVA-NeXT (1.6) | `LlavaNextForConditionalGeneration` | CLIP, SigLIP | Llama, Mistral, Qwen 2, Qwen 3 |

In transformers' format (`llava-hf/…`, `model_type` `llava` and `llava_next`).
Compared with transformers in `tests/engine/test_vision.py` (chunks and blocks that end within an image, cached
prefixes, several images, handoff to an engine without a tower, preemption, replay) and `tests/e2e/test_images.py`
(through router, prefill, transfer and decode, and after a decode instance was killed). Prefill and unified instances of
one rank load the tower; decode instances load the decoder alone, and so do instances of several ranks, which read text.
With LLaVA an image is the same number of tokens whatever its size (576 for LLaVA 1.5), with LLaVA-NeXT its shape
decides (up to 2,928 for 1.6). One side of an image may be 100 times the other at most.
[Why so](adr/0013-images.md).

LLaVA-OneVision, Qwen2-VL, Qwen2.5-VL, Qwen3-VL, InternVL, MiniCPM-V, Phi-3-vision, Pixtral and others are
not served with images: they make tiles in other ways, or give them positions in two dimensions. A request that shows an
image to a model that is not in this table is refused with a 400.

## Not served

| Models | `model_type` | |
|---|---|---|
{refused}
| MPT | `mpt` | refused at start: its forward needs a mask |
| encoder-decoders, state-space and linear-attention layers, bidirectional attention | | refused at start, by name |

What is not in transformers brings Python code in its folder (`auto_map`). An instance says so and ends.
`--trust-remote-code` (off by default) runs that code, and the model is served if it attends through transformers'
attention interface, else refused by name. Where the model is also published in transformers' own format, as GLM-4 is
(`glm`), that copy is served.

A class that is not in the table is served too if all its layers attend through that interface, with one shape of K and
V; nobody has compared it.

Layers with a sliding window keep their whole KV: a block holds all layers
([what freeing it would take](log/sliding-window.md#kv-beyond-a-sliding-window)).
"""


def main() -> int:
    text = build()
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


def build() -> str:
    rows = [row(name, family) for name, family in FAMILIES.items()]
    refused = "\n".join(f"| {models} | `{kind}` | not in transformers |" for kind, models in REFUSED.items())
    return HEAD.format(version=_series()) + "\n".join(rows) + "\n" + TAIL.format(refused=refused)


def row(name: str, family: Family) -> str:
    model = load(family)
    layers = "fused" if fused.fits(model.module) else "transformers"
    process = "●" if name in IN_PROCESSES else ""
    return f"| {family.models} | `{type(model.module).__name__}` | {layers} | {attention(model)} | {process} |"


def load(family: Family) -> LoadedModel:
    """With random weights, from its config alone."""
    loader = importlib.import_module("baton_serve.engine.loading.model_loader")
    device = importlib.import_module("baton_serve.engine.device")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        values = dict(family.config)
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        config.save_pretrained(folder)
        settings = EngineConfig(model=folder, device="cpu", dtype="float32", load_format="dummy")
        model: LoadedModel = loader.load_model(settings, device.select_device("cpu"), lambda what, fraction: None)
    return model


def attention(model: LoadedModel) -> str:
    kinds = [] if model.num_planes == 2 else ["latent (MLA)"]
    specs = model.specs
    if any(spec.sliding_window is not None for spec in specs):
        everywhere = all(spec.sliding_window is not None for spec in specs)
        kinds.append("sliding window" if everywhere else "sliding window in some layers")
    kinds += [word for field, word in WORDS.items() if any(getattr(spec, field) is not None for spec in specs)]
    return ", ".join(kinds) or "full"


WORDS = {"softcap": "soft cap", "sinks": "sinks", "alibi": "ALiBi"}


def _series() -> str:
    return ".".join(transformers.__version__.split(".")[:2])


if __name__ == "__main__":
    sys.exit(main())
