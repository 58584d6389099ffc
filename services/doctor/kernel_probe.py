"""Runs kernels and compares each with its plain-torch twin, in the child process of `kernel_findings.py`.

`kernels` runs this module in a child process with a deadline, because a broken driver may hang or crash it. Each result
is printed as soon as it is known, so that the parent knows which kernel was running when the process ended.
"""

import itertools
import sys
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from baton_serve.engine.device import defaults, select_device
from baton_serve.engine.kernels import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    LayerKernels,
    QuantizedWeight,
    argmax_kernel,
    attention_backend,
    layer_kernels,
)
from baton_serve.engine.kernels.quantized_weights import pack_codes
from baton_serve.engine.kernels.reference import layers as twin_layers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention
from baton_serve.services.doctor.kernel_findings import KERNELS, KernelFacts

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 2, 64, 512
CONTEXTS = (70, 9, 200)
"""KV tokens of the sequences: one is shorter than a block, and some last blocks are not full."""
CHUNK = 5
"""New tokens of each sequence in the check of prefill."""
ArgmaxKernel = Callable[[Tensor, Tensor], Tensor]
"""A function as `engine.kernels.argmax_kernel` returns it."""
HOST = torch.device("cpu")
DTYPE = torch.bfloat16


class KernelChecks:
    """Runs each kernel once on the device and its twin (the same operation in plain torch) once on the CPU, both with
    the same random inputs.

    `dtype` is that of the inputs: Triton's interpreter, in which tests run, does not compute products of bfloat16.
    """

    def __init__(
        self,
        device: torch.device,
        attention: AttentionBackend,
        layers: LayerKernels,
        argmax: ArgmaxKernel,
        *,
        dtype: torch.dtype = DTYPE,
    ) -> None:
        self._device, self._attention, self._layers, self._argmax_kernel = device, attention, layers, argmax
        self._dtype = dtype
        self._block_tokens = defaults(device).block_tokens
        torch.manual_seed(0)

    @property
    def backend(self) -> str:
        """Return the kind of kernels that compute attention on this machine: `triton`, `cpu` (C++) or `reference`
        (plain torch).
        """
        return type(self._attention).__module__.split(".kernels.")[1].split(".")[0]

    def result(self, kernel: str) -> tuple[Tensor, Tensor]:
        """Run the kernel with this name, one of `KERNELS`, and return (its result on the device, the result of its
        twin).
        """
        checks: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            "store": self._store,
            "decode attention": lambda: self._attend(1),
            "prefill attention": lambda: self._attend(CHUNK),
            "norm": self._norm,
            "silu": self._silu,
            "argmax": self._argmax,
            "int8 product": lambda: self._product(8),
            "int4 product": lambda: self._product(4),
        }
        return checks[kernel]()

    def _store(self) -> tuple[Tensor, Tensor]:
        # The whole caches are compared: a kernel must also leave all other blocks, and the other layer, as they were.
        meta, cache = self._batch(CHUNK)
        key, value = (torch.randn(CHUNK * len(CONTEXTS), KV_HEADS, HEAD_DIM, dtype=self._dtype) for _ in range(2))
        # A copy also on the CPU, where `to` alone would return the twin's own cache.
        stored = cache.clone().to(self._device)

        def store(attention: AttentionBackend, target: Tensor, device: torch.device) -> None:
            attention.store(key.to(device), value.to(device), target[:, 1], _on(meta, device))

        store(self._attention, stored, self._device)
        store(ReferenceAttention(), cache, HOST)
        return stored, cache

    def _attend(self, chunk: int) -> tuple[Tensor, Tensor]:
        meta, cache = self._batch(chunk)
        query = torch.randn(chunk * len(CONTEXTS), HEADS, HEAD_DIM, dtype=self._dtype)
        spec = AttentionSpec(HEAD_DIM**-0.5)
        found = self._attention.attend(
            query.to(self._device), cache.to(self._device)[:, 1], _on(meta, self._device), spec
        )
        return found, ReferenceAttention().attend(query, cache[:, 1], meta, spec)

    def _norm(self) -> tuple[Tensor, Tensor]:
        # Seven rows: no multiple of any tile, so that the last tile is not full.
        x, weight = torch.randn(7, HIDDEN, dtype=self._dtype), torch.randn(HIDDEN, dtype=self._dtype)
        found = self._layers.rms_norm(x.to(self._device), weight.to(self._device), 1e-6)
        return found, twin_layers.rms_norm(x, weight, 1e-6)

    def _silu(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(7, 2 * HIDDEN, dtype=self._dtype)
        return self._layers.silu_mul(x.to(self._device)), twin_layers.silu_mul(x)

    def _argmax(self) -> tuple[Tensor, Tensor]:
        # Float32, because equal values are frequent in bfloat16, and columns of equal values differ by backend.
        logits = torch.randn(7, 5000)
        found = torch.empty(7, dtype=torch.int64, device=self._device)
        return self._argmax_kernel(logits.to(self._device), found), logits.argmax(dim=-1)

    def _product(self, bits: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(7, HIDDEN, dtype=self._dtype)
        # All codes occur, the negative ones too: a kernel that loses the sign of a code differs at once.
        codes = torch.randint(0, 1 << bits, (HIDDEN, HIDDEN), dtype=torch.uint8)
        scales = torch.rand(HIDDEN, HIDDEN // 128, dtype=self._dtype) / 16
        if bits == 4:
            # As `sym_int4` in groups of 128, the default of --quantization-group-size.
            weight = QuantizedWeight("int4", HIDDEN, 128, pack_codes(codes, 4), scales)
        else:
            weight = QuantizedWeight("int8", HIDDEN, HIDDEN, codes.view(torch.int8), scales[:, :1].contiguous())
        # The twin runs first: `pack` may take over the memory of the weight.
        expected = twin_layers.linear(x, weight, None)
        packed = self._layers.pack(weight.to(self._device))
        return self._layers.linear(x.to(self._device), packed, None), expected

    def _batch(self, chunk: int) -> tuple[AttentionMetadata, Tensor]:
        """Return the inputs of an attention kernel, both on the CPU: the metadata of sequences with `chunk` new tokens
        each, and a random KV cache of two layers [num_blocks, 2, 2, num_kv_heads, block_tokens, head_dim]. Block 0
        belongs to no sequence.
        """
        block = self._block_tokens
        counts = [-(-context // block) for context in CONTEXTS]
        # In random order, so that a kernel that ignores the block table reads wrong blocks.
        order = (torch.randperm(sum(counts)) + 1).tolist()
        starts = list(itertools.accumulate(counts, initial=0))
        rows = [order[start:end] for start, end in itertools.pairwise(starts)]
        positions = [(row, p) for row, end in zip(rows, CONTEXTS, strict=True) for p in range(end - chunk, end)]
        meta = AttentionMetadata(
            query_starts=torch.arange(0, chunk * len(CONTEXTS) + 1, chunk, dtype=torch.int32),
            context_lens=torch.tensor(CONTEXTS, dtype=torch.int32),
            block_tables=torch.tensor([row + [0] * (max(counts) - len(row)) for row in rows], dtype=torch.int32),
            slots=torch.tensor([row[p // block] * block + p % block for row, p in positions], dtype=torch.int64),
            max_query_len=chunk,
            max_context_len=max(CONTEXTS),
        )
        return meta, torch.randn(len(order) + 1, 2, 2, KV_HEADS, block, HEAD_DIM).to(self._dtype)


def _on(meta: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    return AttentionMetadata(
        query_starts=meta.query_starts.to(device),
        context_lens=meta.context_lens.to(device),
        block_tables=meta.block_tables.to(device),
        slots=meta.slots.to(device),
        max_query_len=meta.max_query_len,
        max_context_len=meta.max_context_len,
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference between the two tensors, as a fraction of the largest absolute value of `expected`;
    infinity if there is NaN.
    """
    a, b = found.to(HOST, torch.float64), expected.to(torch.float64)
    largest = float((a - b).abs().max()) / max(float(b.abs().max()), 1e-30)
    # Only NaN differs from itself.
    return largest if largest == largest else float("inf")


def main() -> None:
    """Compare all kernels with their twins, and print a line of JSON for each as soon as it has run."""
    device = select_device("auto")
    checks = KernelChecks(device, attention_backend(device, DTYPE), layer_kernels(device, DTYPE), argmax_kernel(device))
    for kernel in KERNELS:
        try:
            facts = KernelFacts(kernel, checks.backend, difference(*checks.result(kernel)))
        # A kernel that does not compile must not hide the results of the others.
        except Exception as exc:  # noqa: BLE001 - drivers and compilers raise whatever they want
            facts = KernelFacts(kernel, checks.backend, error=f"{type(exc).__name__}: {exc}".splitlines()[0])
        sys.stdout.buffer.write(msgspec.json.encode(facts) + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
