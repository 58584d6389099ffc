"""The C++ attention against its plain-torch twin, and what replay rests on: no result depends on the batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton_serve.engine.kernels import quantized_kv
from baton_serve.engine.kernels.cpu.attention import CpuAttention
from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels
from baton_serve.engine.kernels.interfaces import AttentionMetadata, AttentionSpec
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

try:
    CPU = CpuAttention(load_kernels())
except KernelsUnavailableError as exc:
    pytest.skip(str(exc), allow_module_level=True)
TWIN = ReferenceAttention()
CODED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module", params=["pairs", "widened", "tiles"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """bf16 by its dot products, as float32, and by AMX where the CPU has it."""
    library = load_kernels(widens=request.param == "widened")
    has_tiles = bool(library.baton_use_tiles(int(request.param == "tiles")))
    if request.param == "tiles" and not has_tiles:
        pytest.skip("this CPU has no AMX")
    vars(CPU).update(vars(CpuAttention(library)))
    yield
    library.baton_use_tiles(1)


@dataclass(frozen=True)
class Batch:
    query: Tensor
    cache: Tensor
    meta: AttentionMetadata

    def attend(self, spec: AttentionSpec, *, backend: CpuAttention | ReferenceAttention = CPU) -> Tensor:
        return backend.attend(self.query, self.cache, self.meta, spec)

    def only(self, s: int, *, last: int | None = None) -> "Batch":
        """Sequence `s` by itself, or just its `last` rows."""
        start, end = int(self.meta.query_starts[s]), int(self.meta.query_starts[s + 1])
        start = start if last is None else end - last
        meta = replace(
            self.meta,
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lens=self.meta.context_lens[s : s + 1],
            block_tables=self.meta.block_tables[s : s + 1],
            max_query_len=end - start,
        )
        return Batch(self.query[start:end], self.cache, meta)


def batch(
    sequences: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    block_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """`sequences` are (new tokens, context before them). Blocks lie in random order in the second of three layers;
    what no sequence owns is NaN, so that reading it shows."""
    generator = torch.Generator().manual_seed(1)
    new = torch.tensor([n for n, _ in sequences], dtype=torch.int32)
    lens = torch.tensor([n + c for n, c in sequences], dtype=torch.int32)
    counts = (lens + block_tokens - 1) // block_tokens
    order = (torch.randperm(int(counts.sum()), generator=generator) + 1).int()
    shape = (int(counts.sum()) + 1, 3, 2, heads[1], block_tokens, head_dim)
    cache = torch.randn(shape, generator=generator).to(dtype)[:, 1]
    cache[0] = float("nan")
    tables = torch.zeros(len(sequences), int(counts.max()) + 1, dtype=torch.int32)
    ends = counts.cumsum(0).tolist()
    for s in range(len(sequences)):
        blocks = order[ends[s] - int(counts[s]) : ends[s]]
        tables[s, : len(blocks)] = blocks
        if len(blocks) and int(lens[s]) % block_tokens:
            cache[int(blocks[-1]), :, :, int(lens[s]) % block_tokens :] = float("nan")
    meta = AttentionMetadata(
        query_starts=torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0).int()]),
        context_lens=lens,
        block_tables=tables,
        slots=torch.zeros(int(new.sum()), dtype=torch.int64),
        max_query_len=int(new.max()),
        max_context_len=int(lens.max()),
    )
    query = torch.randn(int(new.sum()), heads[0], head_dim, generator=generator).to(dtype)
    return Batch(query, cache, meta)


def assert_equals_the_twin(b: Batch, spec: AttentionSpec) -> None:
    expected = replace_nan(b).attend(spec, backend=TWIN)
    torch.testing.assert_close(b.attend(spec), expected, atol=TOLERANCE[b.query.dtype], rtol=1e-2)


def replace_nan(b: Batch) -> Batch:
    return Batch(b.query, b.cache.nan_to_num(), b.meta)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    some_new = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 140)), min_size=1, max_size=3)
    kv_heads = draw(st.integers(1, 3))
    return batch(
        draw(some_new.filter(lambda sequences: any(new for new, _ in sequences))),
        heads=(kv_heads * draw(st.integers(1, 8)), kv_heads),
        head_dim=draw(st.sampled_from([8, 16, 48, 64, 80, 128])),
        block_tokens=draw(st.sampled_from([1, 5, 16, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
    )


@settings(deadline=None, max_examples=16, derandomize=True)
@given(
    b=batches(),
    window=st.sampled_from([None, 1, 7, 70]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    with_sinks=st.booleans(),
)
def test_any_batch_equals_the_twin(b: Batch, window: int | None, softcap: float | None, with_sinks: bool) -> None:
    sinks = torch.linspace(-2, 3, b.query.shape[1]) if with_sinks else None
    assert_equals_the_twin(b, AttentionSpec(b.query.shape[2] ** -0.5, window, softcap, sinks))


@settings(deadline=None, max_examples=8, derandomize=True)
@given(b=batches())
def test_alibi_equals_the_twin(b: Batch) -> None:
    slopes = 2.0 ** -torch.linspace(1, 8, b.query.shape[1])
    assert_equals_the_twin(b, AttentionSpec(b.query.shape[2] ** -0.5, alibi=slopes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_plane_serves_as_keys_and_values(dtype: torch.dtype) -> None:
    """Latent attention: many heads read one, 576 wide in DeepSeek-V2-Lite."""
    b = batch([(1, 700), (30, 70), (5, 0)], heads=(16, 1), head_dim=576, dtype=dtype)
    planes = b.cache[:, :1].contiguous().expand(-1, 2, -1, -1, -1)
    shared = replace(b, cache=planes)
    assert_equals_the_twin(shared, AttentionSpec(192**-0.5))
    assert_equals_the_twin(shared, AttentionSpec(192**-0.5, softcap=20.0, value_dim=512))
    latent = torch.randn(len(b.query), 1, 576).to(dtype)
    meta = replace(b.meta, slots=torch.arange(16, 16 + len(latent)))
    written = []
    for backend in (CPU, TWIN):
        target = torch.zeros(5, 1, 1, 16, 576, dtype=dtype).expand(-1, 2, -1, -1, -1)
        backend.store(latent, latent, target, meta)
        written.append(target)
    assert torch.equal(*written)
    assert torch.equal(written[0][1:4, 1].flatten(0, 2)[: len(latent)], latent[:, 0])


@pytest.mark.parametrize("heads", [3, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_latents_of_a_token_give_the_same_bits_in_a_prompt_in_a_chunk_and_in_decode(
    dtype: torch.dtype, heads: int
) -> None:
    """Decode and short chunks read latents as they lie, long prompts pack them.."""
    b = batch([(150, 1000)], heads=(heads, 1), head_dim=64, dtype=dtype)
    b = replace(b, cache=b.cache[:, :1].contiguous().expand(-1, 2, -1, -1, -1))
    spec = AttentionSpec(0.2, softcap=30.0, value_dim=32)
    whole = b.attend(spec)
    assert whole.shape == (150, heads, 32)
    for last in (13, 2, 1):
        assert torch.equal(b.only(0, last=last).attend(spec), whole[-last:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_equal_the_twin(dtype: torch.dtype) -> None:
    b = batch([(1, 1500), (3, 1022), (70, 600)], heads=(14, 2), head_dim=64, dtype=dtype)
    assert_equals_the_twin(b, AttentionSpec(0.125))
    assert_equals_the_twin(b, AttentionSpec(0.125, sliding_window=600))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_gets_the_same_bits_in_any_batch_on_any_number_of_threads(dtype: torch.dtype) -> None:
    b = batch([(1, 1300), (1, 5), (37, 530), (1, 700)], heads=(7, 1), head_dim=64, dtype=dtype)
    spec = AttentionSpec(0.125, softcap=20.0)
    together = b.attend(spec)
    torch.set_num_threads(3)
    starts = b.meta.query_starts.tolist()
    for s in range(4):
        assert torch.equal(b.only(s).attend(spec), together[starts[s] : starts[s + 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 100])
def test_a_token_gets_the_same_bits_in_a_prompt_in_a_chunk_and_in_decode(
    dtype: torch.dtype, window: int | None
) -> None:
    b = batch([(90, 1000)], heads=(6, 2), head_dim=48, dtype=dtype)
    spec = AttentionSpec(0.2, sliding_window=window)
    whole = b.attend(spec)
    assert torch.equal(b.only(0, last=13).attend(spec), whole[-13:])
    assert torch.equal(b.only(0, last=1).attend(spec), whole[-1:])


def test_strided_queries_need_no_copy() -> None:
    b = batch([(5, 20)], heads=(4, 2))
    fused = torch.randn(5, 8, 32)
    fused[:, 2:6] = b.query
    assert torch.equal(Batch(fused[:, 2:6], b.cache, b.meta).attend(AttentionSpec(0.2)), b.attend(AttentionSpec(0.2)))


def test_dtypes_without_code_go_to_the_twin() -> None:
    b = batch([(5, 20), (1, 3)], dtype=torch.float64)
    spec = AttentionSpec(0.2)
    assert torch.equal(replace_nan(b).attend(spec), replace_nan(b).attend(spec, backend=TWIN))


def test_scores_far_apart_do_not_overflow() -> None:
    b = batch([(4, 30)])
    b = Batch(b.query * 300, b.cache, b.meta)
    assert_equals_the_twin(b, AttentionSpec(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_stored_tokens_lie_at_their_slots_and_negative_slots_store_nothing(dtype: torch.dtype) -> None:
    cache = torch.zeros(4, 2, 2, 3, 5, 16, dtype=dtype)
    layer = cache[:, 1]
    fused = torch.randn(3, 9, 16, dtype=dtype)
    slots = torch.tensor([19, -1, 7])
    meta = replace(batch([(3, 0)]).meta, slots=slots)
    CPU.store(fused[:, 3:6], fused[:, 6:9], layer, meta)
    for token, slot in ((0, 19), (2, 7)):
        assert torch.equal(layer[slot // 5, 0, :, slot % 5], fused[token, 3:6])
        assert torch.equal(layer[slot // 5, 1, :, slot % 5], fused[token, 6:9])
    assert cache[:, 0].count_nonzero() == 0
    assert layer.count_nonzero() == 2 * 2 * 3 * 16


def coded(b: Batch, dtype: torch.dtype, *, garbage: int) -> Batch:
    """The same with what its cache holds in codes; bytes that nobody owns are `garbage`."""
    num_blocks, _, kv_heads, block_tokens, head_dim = b.cache.shape
    rows = block_tokens + -(-2 * block_tokens // head_dim)
    whole = torch.full((num_blocks, 3, 2, kv_heads, rows, head_dim), garbage, dtype=torch.uint8)
    cache = whole.view(dtype)[:, 1, :, :, :block_tokens]
    content = b.cache.float()
    for plane in (0, 1):
        blocks, offsets = (~content[:, plane].isnan().any(-1).any(1)).nonzero().T
        quantized_kv.write(cache, plane, blocks, offsets, content[blocks, plane, :, offsets])
    return replace(b, cache=cache)


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("computes", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [((14, 2), 64), ((6, 3), 48), ((8, 1), 128), ((3, 3), 80)])
def test_kv_in_codes_equals_the_twin(
    dtype: torch.dtype, computes: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    b = batch([(1, 700), (70, 20), (1, 5), (5, 0)], heads=heads, head_dim=head_dim, dtype=computes)
    for spec in (AttentionSpec(0.125), AttentionSpec(0.2, sliding_window=60, softcap=20.0)):
        expected = coded(b, dtype, garbage=0).attend(spec, backend=TWIN)
        found = coded(b, dtype, garbage=0xFF).attend(spec)
        torch.testing.assert_close(found, expected, atol=TOLERANCE[computes], rtol=1e-2)


@pytest.mark.parametrize("computes", [torch.float32, torch.bfloat16])
def test_latents_in_codes_equal_the_twin(computes: torch.dtype) -> None:
    b = coded(batch([(1, 700), (70, 20), (5, 0)], heads=(16, 1), head_dim=96, dtype=computes), torch.int8, garbage=0)
    b = replace(b, cache=b.cache[:, :1].expand(-1, 2, -1, -1, -1))
    spec = AttentionSpec(0.125, value_dim=64)
    expected = b.attend(spec, backend=TWIN)
    torch.testing.assert_close(b.attend(spec), expected, atol=TOLERANCE[computes], rtol=1e-2)


def test_kv_in_codes_and_alibi_equal_the_twin() -> None:
    b = coded(batch([(3, 90)]), torch.int8, garbage=0)
    spec = AttentionSpec(0.2, alibi=2.0 ** -torch.linspace(1, 8, 4))
    torch.testing.assert_close(b.attend(spec), b.attend(spec, backend=TWIN), atol=5e-6, rtol=1e-2)


@pytest.mark.parametrize("dtype", CODED)
def test_of_kv_in_codes_too_a_token_gets_the_same_bits_in_a_prompt_in_a_chunk_and_in_decode(dtype: torch.dtype) -> None:
    b = coded(batch([(90, 1000)], heads=(14, 2), head_dim=64, dtype=torch.bfloat16), dtype, garbage=0xFF)
    spec = AttentionSpec(0.125)
    whole = b.attend(spec)
    torch.set_num_threads(3)
    assert torch.equal(b.only(0, last=13).attend(spec), whole[-13:])
    assert torch.equal(b.only(0, last=1).attend(spec), whole[-1:])


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("computes", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 64, 80])
def test_codes_are_stored_as_the_twin_stores_them(dtype: torch.dtype, computes: torch.dtype, size: int) -> None:
    """Every bit: rows large and tiny, of zeros, and with elements below a code's least normal number."""
    b = coded(batch([(3, 0)], heads=(3, 3), head_dim=size, dtype=computes), dtype, garbage=0)
    rows = (
        torch.randn(30, 6, size)
        * 10.0 ** torch.randint(-6, 4, (30, 6, 1))
        * 2.0 ** -torch.randint(0, 14, (30, 6, size))
    )
    rows[3] = 0
    key, value = rows.to(computes)[:, :3], rows.to(computes)[:, 3:]
    meta = replace(b.meta, slots=torch.randperm(b.cache.shape[0] * b.cache.shape[3])[:30])
    meta.slots[7] = -1
    found = []
    for backend in (CPU, TWIN):
        storage = torch.tensor([], dtype=torch.uint8).set_(b.cache.untyped_storage()).clone()
        cache = storage.view(dtype).as_strided(b.cache.shape, b.cache.stride(), b.cache.storage_offset())
        backend.store(key, value, cache, meta)
        found.append(storage)
    assert torch.equal(*found)
