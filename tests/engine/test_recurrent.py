"""Models with recurrent states, driven step by step without the engine: packed steps equal transformers' own loop."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.engine import EngineConfig
from baton_serve.engine.collectives.backends import SingleRank
from baton_serve.engine.errors import UnsupportedModelError
from baton_serve.engine.kernels import AttentionMetadata, MixerKernels, attention_backend, layer_kernels
from baton_serve.engine.kernels.cpu.layers import CpuLayers
from baton_serve.engine.kernels.cpu.mixers import CpuMixers
from baton_serve.engine.kernels.mixers import CHECKPOINT_STEP_TOKENS, NO_MIXERS, InnerCheckpoints
from baton_serve.engine.kernels.reference import layers as reference_layers
from baton_serve.engine.kernels.reference import mixers as reference_mixers
from baton_serve.engine.kv.kv_cache import KVCache
from baton_serve.engine.kv.state_memory import MAX_CHECKPOINT_BLOCKS, StateMemory
from baton_serve.engine.loading.transformers_loader import load_model
from baton_serve.engine.model import fused_cpu
from baton_serve.engine.model.batch_inputs import StepInputs, StepStates
from baton_serve.engine.model.batched_mixers import packed_shapes
from baton_serve.engine.model.forward import choose_forward
from baton_serve.engine.model.fused_cpu import CpuForward
from baton_serve.engine.model.loaded_model import LoadedModel
from baton_serve.engine.model.mixer_adapters import OWN_FORWARDS
from baton_serve.engine.model.recurrent import StateProbe
from tests.engine.conftest import ANSWER_TOKENS, References, greedy_answer
from tests.engine.driving import make_engine, make_work, run
from tests.engine.test_packed import can_pack
from tests.families import HYBRIDS, MAX_POSITIONS
from tests.tiny_models import load_reference, write_tiny_model

BLOCK_TOKENS = 16
BLOCKS_PER_SLOT = 10
NUM_SLOTS = SPARE_ROW = 7
CPU = torch.device("cpu")
STATE_SPACES = ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "nemotron_h", "zamba2")
"""The families with Mamba-1 or Mamba-2 whose names do not say it."""


@dataclass(slots=True)
class PackedSequence:
    """A prompt with its answer so far. `computed` tokens are in the cache and in the states."""

    slot: int
    tokens: list[int]
    num_prompt_tokens: int
    computed: int = 0

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class PackedModel:
    """A model with KV blocks and state slots, of which each sequence has its own."""

    def __init__(self, model: LoadedModel, *, uses_kernels: bool = True, mixers: MixerKernels | None = None) -> None:
        """`mixers` None: the CPU's own."""
        self.model = model
        layout = KVLayout(
            fingerprint="",
            num_layers=len(model.specs),
            num_kv_heads=model.num_kv_heads,
            block_tokens=BLOCK_TOKENS,
            head_dim=model.head_dim,
            dtype=str(model.dtype).removeprefix("torch."),
            num_planes=model.kv_shapes[0].num_planes,
        )
        self._cache = KVCache(layout, NUM_SLOTS * BLOCKS_PER_SLOT, CPU, place="device")
        kernels = layer_kernels(CPU, model.dtype) if uses_kernels else reference_layers
        backend = attention_backend(CPU, model.dtype)
        own: MixerKernels = CpuMixers(kernels.library) if isinstance(kernels, CpuLayers) else reference_mixers
        self.forward = choose_forward(model, backend, kernels, SingleRank(), mixers=mixers or own)
        self.states = StateMemory(model.states, NUM_SLOTS + 1, self._cache.device_tensor, CPU)
        # Of the kernels in use, those of accelerators store states between their chunks.
        self._step_tokens = 1 if mixers is None else CHECKPOINT_STEP_TOKENS
        self.stored: list[int] = []
        """The layers with KV, in the order in which steps have stored their KV."""

    def step(self, chunks: Sequence[tuple[PackedSequence, int]]) -> Tensor:
        """Compute the next tokens of each sequence, and return the logits after each chunk. The states in the middle of
        the longest one go to `SPARE_ROW`."""
        tables = torch.tensor([[s.slot * BLOCKS_PER_SLOT + i for i in range(BLOCKS_PER_SLOT)] for s, _ in chunks])
        lengths = [length for _, length in chunks]
        positions = torch.cat([torch.arange(s.computed, s.computed + length) for s, length in chunks])
        first_slots = torch.tensor([s.slot * BLOCKS_PER_SLOT * BLOCK_TOKENS for s, _ in chunks])
        starts = torch.tensor([0, *lengths]).cumsum(0)
        ends = [s.computed + length for s, length in chunks]
        meta = AttentionMetadata(
            query_starts=starts.int(),
            context_lens=torch.tensor(ends).int(),
            block_tables=tables.int(),
            slots=first_slots.repeat_interleave(torch.tensor(lengths)) + positions,
            max_query_len=max(lengths),
            max_context_len=max(ends),
        )
        tokens = [token for s, length in chunks for token in s.tokens[s.computed : s.computed + length]]
        slots = torch.tensor([s.slot for s, _ in chunks])
        states = StepStates(slots, lengths, self.states.views)
        if max(lengths) > 1:
            longest = lengths.index(max(lengths))
            middle = -(-lengths[longest] // 2 // self._step_tokens) * self._step_tokens
            inner = [middle * (number == longest and middle < length) for number, length in enumerate(lengths)]
            rows = torch.tensor([SPARE_ROW if count else -1 for count in inner])
            states = replace(states, checkpoints=InnerCheckpoints(rows, torch.tensor(inner).int()), inner_lengths=inner)
        inputs = StepInputs(
            torch.tensor(tokens),
            positions,
            starts[1:] - 1,
            meta,
            after_layer=self.stored.append,
            states=states,
        )
        for s, length in chunks:
            s.computed += length
        with torch.inference_mode():
            return self.forward(inputs, self._cache.layers())


def load(folder: Path, **settings: object) -> LoadedModel:
    config = EngineConfig(model=str(folder), device="cpu", **{"dtype": "float32", **settings})  # type: ignore[arg-type]
    return load_model(config, CPU, lambda what, fraction: None)


@dataclass
class Schedule:
    """Draws steps that mix chunks of prompts, of odd lengths, and single tokens."""

    seed: str
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def chunks(self, running: list[PackedSequence]) -> list[tuple[PackedSequence, int]]:
        chosen = self.draw.sample(running, self.draw.randint(1, len(running)))
        return [(s, min(len(s.tokens) - s.computed, self.draw.choice((1, 2, 3, 7, 19, 40)))) for s in chosen]


def answers(packed: PackedModel, prompts: list[list[int]], schedule: Schedule, num_tokens: int) -> list[list[int]]:
    """Answer all prompts in mixed steps, with as many tokens each."""
    slots = schedule.draw.sample(range(NUM_SLOTS), len(prompts))
    sequences = [PackedSequence(slot, list(prompt), len(prompt)) for slot, prompt in zip(slots, prompts, strict=True)]
    for s in sequences:
        packed.states.clear(s.slot)
    ends = packed.model.eos_token_ids
    while running := [s for s in sequences if len(s.answer) < num_tokens and not ends & set(s.answer)]:
        chunks = schedule.chunks(running)
        for (s, _), logits in zip(chunks, packed.step(chunks), strict=True):
            if s.computed == len(s.tokens):
                s.tokens.append(int(logits.argmax()))
    return [s.answer for s in sequences]


@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_steps_with_odd_chunks_equal_generate(references: References, family: str) -> None:
    reference = references(family)
    assert len({tuple(answer) for answer in reference.answers}) > 3
    schedule = Schedule(family)
    for uses_kernels in (True, False):
        packed = PackedModel(load(reference.folder), uses_kernels=uses_kernels)
        # These slots have states, which `clear` must remove.
        packed.step([(PackedSequence(slot, [slot] * 5, 5), 5) for slot in range(NUM_SLOTS)])
        assert answers(packed, reference.prompts, schedule, ANSWER_TOKENS) == reference.answers


@pytest.mark.skipif(not can_pack(), reason="needs a compiler and a CPU with bf16 dot products")
@pytest.mark.parametrize(
    ("heads", "key_size", "value_size", "taps"), [(4, 16, 24, 4), (3, 12, 130, 3), (2, 128, 128, 4)]
)
def test_one_call_of_a_hybrid_computes_the_bits_of_its_layers(
    heads: int, key_size: int, value_size: int, taps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(
        tmp_path,
        "qwen3_5",
        linear_num_key_heads=heads // 2 if heads % 2 == 0 else heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=key_size,
        linear_value_head_dim=value_size,
        linear_conv_kernel_dim=taps,
        layer_types=["linear_attention", "full_attention"] * 2,
    )
    draw = random.Random(heads)
    prompts = [[draw.randrange(250) for _ in range(length)] for length in (70, 3, 41, 1)]

    def logits(*, is_one_call: bool) -> list[Tensor]:
        packed, schedule = PackedModel(load(folder, dtype="bfloat16")), Schedule("bits")
        sequences = [
            PackedSequence(slot, list(prompt), len(prompt)) for slot, prompt in zip((5, 0, 2, 6), prompts, strict=True)
        ]
        assert isinstance(packed.forward, CpuForward) is is_one_call
        found: list[Tensor] = []
        for s in sequences:
            packed.states.clear(s.slot)
        while running := [s for s in sequences if len(s.answer) < 5]:
            chunks = schedule.chunks(running)
            found.append(packed.step(chunks))
            for (s, _), row in zip(chunks, found[-1], strict=True):
                if s.computed == len(s.tokens):
                    s.tokens.append(int(row.argmax()))
        assert packed.stored == list(range(len(packed.model.specs))) * len(found)
        return [*found, *(view for layer in packed.states.views.values() for view in layer.values())]

    once = logits(is_one_call=True)
    monkeypatch.setattr(fused_cpu, "fits", lambda *_: False)
    layers = logits(is_one_call=False)
    assert all(torch.equal(one, other) for one, other in zip(once, layers, strict=True))


@pytest.mark.parametrize("changed", [{"linear_conv_kernel_dim": 18}, {"layer_types": ["linear_attention"] * 4}])
def test_hybrids_that_one_call_does_not_support_run_layer_by_layer(changed: dict[str, Any], tmp_path: Path) -> None:
    packed = PackedModel(load(write_tiny_model(tmp_path, "qwen3_5", **changed), dtype="bfloat16"))
    assert not isinstance(packed.forward, CpuForward)


def test_a_mixer_that_ignores_its_state_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "jamba", "jamba")
    # transformers' own scan of several tokens starts at zero.
    monkeypatch.delitem(OWN_FORWARDS, "JambaMambaMixer")
    with pytest.raises(UnsupportedModelError, match="JambaMambaMixer does not continue from its states"):
        load(folder)


def test_a_model_without_attention_has_blocks_for_checkpoints_alone(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "granite", "granitemoehybrid", layer_types=["linear_attention"] * 3)
    prompt = [(7 * i * i + i) % 250 for i in range(75)]
    # transformers' own cache needs a layer with attention for this class.
    model, tokens = load_reference(folder), list(prompt)
    for _ in range(12):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    expected = tokens[len(prompt) :]
    with make_engine(folder, max_model_len=MAX_POSITIONS) as engine:
        assert engine.layout.num_layers == 1 and engine.layout.state_blocks <= MAX_CHECKPOINT_BLOCKS
        for attempt in ("first", "again"):
            engine.add(make_work(engine, attempt, prompt))
            assert run(engine)[attempt, 0] == expected
        assert engine.stats().prefix_hit_tokens == 64


def test_the_probe_finds_states_and_kv_of_each_layer(tmp_path: Path) -> None:
    model = load(write_tiny_model(tmp_path / "nemotron", "nemotron_h"))
    assert model.kv_layers == (2,)
    assert [(part.layer, part.kind, part.shape, part.dtype) for part in model.states] == [
        (0, "conv", (8 * 16 + 2 * 2 * 16, 4), torch.float32),
        (0, "recurrent", (8, 16, 16), torch.float32),
        (4, "conv", (8 * 16 + 2 * 2 * 16, 4), torch.float32),
        (4, "recurrent", (8, 16, 16), torch.float32),
    ]
    both = load(write_tiny_model(tmp_path / "falcon", "falcon_h1"))
    assert both.kv_layers is None
    assert {part.layer for part in both.states} == {0, 1, 2}


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_keep_their_precision_in_bfloat16(tmp_path: Path, family: str) -> None:
    model = load(write_tiny_model(tmp_path / family, family), dtype="bfloat16")
    assert {part.dtype for part in model.states if part.kind == "conv"} <= {torch.bfloat16}
    assert {part.dtype for part in model.states if part.kind == "recurrent"} <= {torch.float32}
    packed = PackedModel(model)
    sequences = [PackedSequence(slot, list(range(40)), 40) for slot in range(3)]
    with torch.inference_mode():
        packed.step([(sequences[0], 33), (sequences[1], 1), (sequences[2], 7)])
        logits = packed.step([(sequences[0], 7), (sequences[1], 39), (sequences[2], 33)])
    # The three have the same tokens, in other chunks.
    spread = (logits - logits[0]).abs().max()
    assert spread < 0.1 * logits.abs().max()


@pytest.mark.parametrize("num_shared", [480, 380])
def test_prompts_that_share_a_prefix_hit_it_after_the_second(num_shared: int, references: References) -> None:
    """The two workloads of vLLM #45238: a prefix that is 100 tokens shorter must not lose all hits.

    The first prompt has a checkpoint at its own end alone. The second finds where both part, and leaves one there.
    """
    draw = random.Random(num_shared)
    shared = [draw.randrange(256) for _ in range(num_shared)]
    prompts = [shared + [draw.randrange(256) for _ in range(20)] for _ in range(66)]
    folder = references("qwen3_next").folder
    model = load_reference(folder)
    with make_engine(folder, max_model_len=MAX_POSITIONS, kv_cache_bytes=32 << 20) as engine:
        for number, prompt in enumerate(prompts):
            engine.add(make_work(engine, str(number), prompt, max_tokens=2))
            before = engine.stats().prefix_hit_tokens
            answers = run(engine)
            hits = engine.stats().prefix_hit_tokens - before
            assert hits == (num_shared // BLOCK_TOKENS * BLOCK_TOKENS if number >= 2 else 0), number
            if number < 4:
                assert answers[str(number), 0] == greedy_answer(model, prompt, 2)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_checkpoints_return_from_the_host_tier(family: str, references: References) -> None:
    """The cache holds one prompt with its checkpoints. Each other prompt evicts it, with its checkpoints."""
    reference = references(family)
    with make_engine(reference.folder, max_model_len=128) as engine:
        num_blocks = 128 // BLOCK_TOKENS + 2 * engine.layout.state_blocks
    settings = {"num_gpu_blocks_override": num_blocks, "max_model_len": 128, "host_kv_bytes": 8 << 20}
    with make_engine(reference.folder, **settings) as engine:
        for attempt in range(2):
            for number, (prompt, answer) in enumerate(zip(reference.prompts, reference.answers, strict=True)):
                engine.add(make_work(engine, f"{attempt}-{number}", prompt))
                assert run(engine)[f"{attempt}-{number}", 0] == answer
        # The three longest prompts end behind a checkpoint at 32, 96 and 48 tokens.
        assert engine.stats().host_hit_tokens >= 32 + 96


def test_an_older_transformers_is_named_as_the_reason(references: References, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StateProbe, "get_conv_state")
    with pytest.raises(UnsupportedModelError, match=r"use transformers 5\.23 or later"):
        make_engine(references("lfm2").folder)


def test_weights_that_layers_share_are_rounded_in_all_of_them(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "zamba2", "zamba2")
    packed = PackedModel(load(folder, quantization="int8"))
    exact = PackedModel(load(folder))
    (rounded,), (logits,) = (one.step([(PackedSequence(0, list(range(20)), 20), 20)]) for one in (packed, exact))
    assert 0 < (rounded - logits).abs().max() < 0.2 * logits.abs().max()


@pytest.mark.parametrize("family", [name for name in HYBRIDS if "mamba" in name or name in STATE_SPACES])
def test_state_spaces_run_a_step_at_once_where_no_cpu_kernels_are(tmp_path: Path, family: str) -> None:
    model = load(write_tiny_model(tmp_path / family, family))
    assert len(packed_shapes(model.module, NO_MIXERS).spaces) == 1
    check_packed(model)


def test_other_recurrences_run_a_step_at_once_where_no_cpu_kernels_are(tmp_path: Path) -> None:
    kimi, bailing, minimax = (
        load(write_tiny_model(tmp_path / family, family)) for family in ("kimi_linear", "bailing_hybrid", "minimax")
    )
    for model in (kimi, bailing, minimax):
        check_packed(model)
    own = packed_shapes(kimi.module, NO_MIXERS)
    assert own.has_channel_decay and (own.num_heads, own.key_size, own.value_size) == (4, 16, 16)
    assert packed_shapes(bailing.module, NO_MIXERS).has_channel_decay
    own = packed_shapes(minimax.module, NO_MIXERS)
    assert (own.num_heads, own.num_lightning_heads, own.lightning_size) == (0, 4, 32)


def check_packed(model: LoadedModel) -> None:
    PackedModel(model, uses_kernels=False)
    mixers = [part.baton_mixer for part in model.module.modules() if hasattr(part, "baton_mixer")]
    assert mixers and all(mixer.packed is not None for mixer in mixers)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["bamba", "nemotron_h", "lfm2", "kimi_linear"])
def test_steps_of_one_token_use_the_kernels(tmp_path: Path, family: str) -> None:
    model = load(write_tiny_model(tmp_path / family, family))
    mixers = [part.baton_mixer for part in model.module.modules() if hasattr(part, "baton_mixer")]
    assert mixers and all(mixer.step is None for mixer in mixers)  # type: ignore[union-attr]
    PackedModel(model)
    if isinstance(layer_kernels(CPU, model.dtype), CpuLayers):
        assert all(mixer.step is not None for mixer in mixers)  # type: ignore[union-attr]
