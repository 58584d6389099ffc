"""Decides which kernels an engine uses: the fastest candidate of each operation that equals its plain-torch twin.

The verdicts are kept in `proofs` in the folder of caches, under a name that follows from everything that may change
them: device, driver, versions of torch and Triton, the source of the kernels, and the shapes.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch

from baton_serve.contracts.instance import KernelVerdict
from baton_serve.contracts.model_path import process_cache_folder
from baton_serve.engine import device as devices
from baton_serve.engine.kernels.composition import ComposedAttention, ComposedLayers
from baton_serve.engine.kernels.cpu.decoder_proof import DecoderKernel, TwinDecoder, decoder_operations
from baton_serve.engine.kernels.interfaces import AttentionBackend, LayerKernels
from baton_serve.engine.kernels.mixer_operations import MIXER_OPERATIONS, ComposedMixers, mixer_operations
from baton_serve.engine.kernels.mixers import NO_MIXERS, MixerKernels
from baton_serve.engine.kernels.operations import (
    Argmax,
    ProofShapes,
    argmax_operations,
    attention_operations,
    layer_operations,
)
from baton_serve.engine.kernels.prover import (
    TWIN,
    KernelCandidate,
    Made,
    Operation,
    Prover,
    make_candidates,
    warn_of_wrong,
)
from baton_serve.engine.kernels.reference import layers as twin_layers
from baton_serve.engine.kernels.reference import mixers as twin_mixers
from baton_serve.engine.kernels.reference.attention import ReferenceAttention

K = TypeVar("K")
_MadeKinds: TypeAlias = tuple[
    list[Made[AttentionBackend]],
    list[Made[LayerKernels]],
    list[Made[Argmax]],
    list[Made[DecoderKernel]],
    list[Made[MixerKernels]],
]

_TWIN_DECODER: DecoderKernel = TwinDecoder
_TWIN_MIXERS: MixerKernels = twin_mixers
MIXED = "mixed attention"
_SOURCES = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class KernelCandidates:
    """The kernels that an engine may use on a device, each kind in order of preference. Plain torch (the twins) serves
    where none gives right results.
    """

    attention: tuple[KernelCandidate[AttentionBackend], ...] = ()
    layers: tuple[KernelCandidate[LayerKernels], ...] = ()
    argmax: tuple[KernelCandidate[Argmax], ...] = ()
    decoders: tuple[KernelCandidate[DecoderKernel], ...] = ()
    """Implementations of all layers in one call."""
    mixers: tuple[KernelCandidate[MixerKernels], ...] = ()


@dataclass(frozen=True, slots=True)
class ProvedKernels:
    """The kernels that an engine uses, after they were compared with plain torch, and the verdicts of the
    comparison.
    """

    attention: AttentionBackend
    layers: LayerKernels
    argmax: Argmax
    verdicts: tuple[KernelVerdict, ...]
    mixes_prompts: bool
    """True if `attention` is right for steps in which some sequences decode and others compute their prompts. If not,
    each step of the scheduler is of one kind."""
    has_decoder: bool
    """True if the implementation of all layers in one call is right."""
    mixers: MixerKernels


def prove_kernels(
    candidates: KernelCandidates,
    shapes: ProofShapes,
    device: torch.device,
    *,
    folder: Path | None,
    is_timed: bool | None = None,
) -> ProvedKernels:
    """Compare the candidates with plain torch and return the kernels to use. If `folder` has the verdicts of an earlier
    comparison with the same shapes, device and sources, these are used (None: always compare). Log a warning for each
    wrong kernel.

    `is_timed` says whether the fastest right kernel is chosen, not the first; None: on accelerators, but not on CPUs.
    """
    made = (
        make_candidates(candidates.attention),
        make_candidates(candidates.layers),
        make_candidates(candidates.argmax),
        # A model with layers of different shapes is not computed in one call.
        make_candidates(() if shapes.others else candidates.decoders),
        make_candidates(candidates.mixers if shapes.mixers != NO_MIXERS else ()),
    )
    file = (
        None
        if folder is None
        else folder / f"{_proof_key([one for kind in made for one in kind], shapes, device)}.json"
    )
    verdicts = _read(file)
    if verdicts is None:
        prover = Prover(device, is_timed=not devices.is_host(device) if is_timed is None else is_timed)
        verdicts = _prove_all(prover, made, shapes, device)
        _write(file, verdicts)
    warn_of_wrong(verdicts)
    chosen = _Choice(verdicts)
    return ProvedKernels(
        attention=_attention(chosen, made[0]),
        layers=_layers(chosen, made[1]),
        argmax=chosen.of("argmax", made[2]) or twin_layers.argmax,
        verdicts=tuple(verdicts),
        mixes_prompts=_mixes(chosen, verdicts),
        has_decoder=bool(made[3]) and chosen.of("decoder", made[3]) is not None,
        mixers=_mixers(chosen, made[4]),
    )


def proof_folder() -> Path | None:
    """Return the folder in which the verdicts of kernel comparisons are kept; None if this user has no home folder."""
    try:
        return process_cache_folder() / "proofs"
    except RuntimeError:
        return None


def _prove_all(prover: Prover, made: _MadeKinds, shapes: ProofShapes, device: torch.device) -> list[KernelVerdict]:
    # Several threads of a busy host would wait for each other much longer than these small operations take.
    with torch.inference_mode(), devices.one_thread() if devices.is_host(device) else contextlib.nullcontext():
        attention = [op for one in (shapes, *shapes.others) for op in attention_operations(one, device)]
        return [
            *(_prove(prover, attention, ReferenceAttention(), made[0]) if made[0] else ()),
            *(_prove(prover, layer_operations(shapes, device), twin_layers, made[1]) if made[1] else ()),
            *(_prove(prover, argmax_operations(shapes, device), twin_layers.argmax, made[2]) if made[2] else ()),
            *(_prove(prover, decoder_operations(shapes), _TWIN_DECODER, made[3]) if made[3] else ()),
            *(_prove(prover, mixer_operations(shapes, device), _TWIN_MIXERS, made[4]) if made[4] else ()),
        ]


def _prove(prover: Prover, operations: Iterable[Operation[K]], twin: K, made: Sequence[Made[K]]) -> list[KernelVerdict]:
    return [verdict for operation in operations for verdict in prover.prove(operation, twin, made)]


class _Choice:
    """Finds the implementation that the verdicts have chosen for an operation. An implementation that is wrong for some
    shapes of an operation is not used for it at all.
    """

    def __init__(self, verdicts: Sequence[KernelVerdict]) -> None:
        wrong = {(one.operation, one.candidate) for one in verdicts if not one.is_right}
        self.wrong = {operation for operation, _ in wrong}
        """The operations for which a candidate is wrong."""
        self._names: dict[str, str] = {}
        for one in verdicts:
            is_usable = (one.operation, one.candidate) not in wrong
            if is_usable and (one.is_chosen or one.operation in self.wrong):
                self._names.setdefault(one.operation, one.candidate)
        self._proved = {one.operation for one in verdicts}

    def name(self, operation: str) -> str:
        """Return the name of the implementation that serves this operation. Return "" if it was not compared, because
        the model does not have the operation.
        """
        return self._names.get(operation, TWIN if operation in self._proved else "")

    def of(self, operation: str, made: Sequence[Made[K]]) -> K | None:
        """Return the implementation that serves this operation; None if plain torch does. `made` are the candidates."""
        name = self.name(operation)
        return next((one.kernels for one in made if one.candidate.name == name), None)


def _attention(chosen: _Choice, made: Sequence[Made[AttentionBackend]]) -> AttentionBackend:
    twin: AttentionBackend = ReferenceAttention()
    # A cache that one kernel has written is read by others: they agree on its layout, which the twin specifies.
    storing, decode, prefill = (
        chosen.of(name, made) or twin for name in ("KV store", "decode attention", "prefill attention")
    )
    fused = chosen.of("fused decode attention", made)
    if storing is decode is prefill and (fused is storing or "fused decode attention" not in chosen.wrong):
        return storing
    return ComposedAttention(storing, decode, prefill, fused)


def _layers(chosen: _Choice, made: Sequence[Made[LayerKernels]]) -> LayerKernels:
    twin: LayerKernels = twin_layers
    operations = ("product", "norm", "gate", "rotation", "rotary store", "experts", "other norms", "GELU gate")
    if not made or all(chosen.name(one) == TWIN for one in operations):
        return twin
    first = made[0].candidate.name
    if not chosen.wrong & {*operations, "fused products"} and all(
        chosen.name(one) in (first, "") for one in operations
    ):
        return chosen.of("product", made) or twin
    # An operation that was not proved, as the model has none, is that of the twin.
    products, fused = chosen.of("product", made) or twin, chosen.of("fused products", made)
    others = [chosen.of(one, made) or twin for one in operations[1:]]
    return ComposedLayers(products, fused if fused is products else None, *others)


def _mixers(chosen: _Choice, made: Sequence[Made[MixerKernels]]) -> MixerKernels:
    parts = [chosen.of(name, made) or _TWIN_MIXERS for name in MIXER_OPERATIONS]
    # Operations that the model does not have were not proved, and are not called.
    used = [part for name, part in zip(MIXER_OPERATIONS, parts, strict=True) if chosen.name(name)]
    return used[0] if used and all(part is used[0] for part in used) else ComposedMixers(*parts)


def _mixes(chosen: _Choice, verdicts: Sequence[KernelVerdict]) -> bool:
    """Return whether the kernel that serves prompts also gives right results for steps in which other sequences
    decode.
    """
    # Mixed steps have more than one new token per sequence, so they go to what serves prompts.
    name = chosen.name("prefill attention")
    return not any(v.operation == MIXED and v.candidate == name and not v.is_right for v in verdicts)


def _read(file: Path | None) -> list[KernelVerdict] | None:
    """Return the verdicts that an earlier comparison has written to `file`; None if there are none or `file` is
    None.
    """
    if file is None:
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[KernelVerdict])
    except (OSError, msgspec.DecodeError):
        return None


def _write(file: Path | None, verdicts: Sequence[KernelVerdict]) -> None:
    """Write the verdicts of a comparison to `file` for later starts. A folder that cannot be written is ignored."""
    if file is None:
        return
    # A home folder that is read-only or full costs the next start a proof, nothing else.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(prefix="proof-", dir=file.parent)
        with os.fdopen(handle, "wb") as output:
            output.write(msgspec.json.encode(verdicts))
        Path(partial).replace(file)


def _proof_key(made: Sequence[Made[Any]], shapes: ProofShapes, device: torch.device) -> str:
    digest = hashlib.sha256()
    parts = (
        devices.device_name(device) or platform.processor() or platform.machine(),
        devices.driver_version(device),
        torch.__version__,
        _triton_version(),
        _fingerprint(),
        shapes.key,
        *map(_described, made),
    )
    # Parts are separated, so that no two lists of parts give the same bytes.
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _described(made: Made[Any]) -> str:
    """Return a text that identifies a candidate: its name and that of its class or module, which a later version may
    change.
    """
    kernels = made.kernels
    where = getattr(kernels, "__name__", None) or f"{type(kernels).__module__}.{type(kernels).__qualname__}"
    return f"{made.candidate.name} {where} {made.error}"


def _triton_version() -> str:
    # Read without importing it, which takes a second.
    if importlib.util.find_spec("triton") is None:
        return ""
    names = ("triton", "triton-xpu", "pytorch-triton-xpu", "pytorch-triton")
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{name} {metadata.version(name)}"
    return "unknown"


@functools.cache
def _fingerprint() -> str:
    """Return a hash of the source files of all kernels, in Python and C++: kernels are compared again when one
    changes.
    """
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*")):
        if path.suffix in {".py", ".cpp", ".h"}:
            digest.update(str(path.relative_to(_SOURCES)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
