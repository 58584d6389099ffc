"""Reads tensors of clients (`image_embeds`) in files of `torch.save` or safetensors, without unpickling.

A file of `torch.save` holds a pickle, which can run any code if Python loads it. Here its instructions are interpreted
one by one, and only those of a single tensor are known.
"""

import pickletools
from collections.abc import Sequence
from io import BytesIO
from math import prod
from struct import error as StructError
from struct import unpack, unpack_from
from types import MappingProxyType
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import msgspec

_MAX_INDEX_BYTES = 64 * 1024
"""Largest directory of an archive, and largest header of safetensors."""
_MAX_PICKLE_BYTES = 4 * 1024
"""Largest pickle of a single tensor. torch.save writes less than 300 bytes."""

_ITEM_BYTES = MappingProxyType({"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4})
_STORAGES = MappingProxyType(
    {
        "torch FloatStorage": "float32",
        "torch HalfStorage": "float16",
        "torch BFloat16Storage": "bfloat16",
        "torch LongStorage": "int64",
        "torch IntStorage": "int32",
    }
)
_SAFETENSORS = MappingProxyType(
    {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
)
_ERRORS = (
    *(BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, StructError),  # of zipfile
    *(KeyError, IndexError, UnicodeDecodeError, msgspec.MsgspecError),
)
"""Errors of damaged files beside `ValueError`."""
_REBUILD = "torch._utils _rebuild_tensor_v2"
_HOOKS = "collections OrderedDict"
_UNREAD = "it is not a single tensor as torch.save or safetensors writes it"
_EOCD_BYTES, _ZIP64_BYTES = 22, 98
"""Sizes of the end of an archive without a comment, and with the records of its 64-bit form before it."""


class TensorFile(NamedTuple):
    """A tensor whose values lie one after another in `data`, the last dimension first, in little-endian order."""

    dtype: str
    """A name of torch: float32, float16, bfloat16, int64 or int32."""
    shape: tuple[int, ...]
    data: bytes

    def integers(self) -> list[int]:
        """Return the values of a tensor of integers. Raises `ValueError` for another tensor."""
        if self.dtype not in ("int64", "int32"):
            raise ValueError(f"its values are {self.dtype}; they must be int64 or int32")
        return list(unpack(f"<{prod(self.shape)}{'q' if self.dtype == 'int64' else 'i'}", self.data))


def read_tensor(file: bytes) -> TensorFile:
    """Return the tensor in a file of `torch.save` or safetensors. Raises `ValueError` if it is anything else.

    No value is allocated from a number in the file: memory is bounded by the file's size.
    """
    try:
        return _of_archive(file) if file.startswith(b"PK") else _of_safetensors(file)
    except _ERRORS as exc:
        raise ValueError(_UNREAD) from exc


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _of_safetensors(file: bytes) -> TensorFile:
    size = int.from_bytes(file[:8], "little")
    if not 0 < size <= _MAX_INDEX_BYTES:
        raise ValueError(_UNREAD)
    header = msgspec.json.decode(file[8 : 8 + size], type=dict[str, Any])
    entries = [msgspec.convert(value, _Entry) for name, value in header.items() if name != "__metadata__"]
    if len(entries) != 1:
        raise ValueError(f"it has {len(entries)} tensors; it must have one")
    (entry,) = entries
    start, end = entry.data_offsets
    dtype = _SAFETENSORS.get(entry.dtype)
    if dtype is None:
        raise ValueError(f"its values are {entry.dtype[:20]}; they must be {', '.join(_ITEM_BYTES)}")
    if not 0 <= start <= end:
        raise ValueError(_UNREAD)
    return _checked(dtype, entry.shape, file[8 + size + start : 8 + size + end])


def _of_archive(file: bytes) -> TensorFile:
    _check_directory(file)
    with ZipFile(BytesIO(file)) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        # A compressed entry could become far larger than the file.
        if any(info.compress_type != ZIP_STORED or info.file_size > len(file) for info in infos.values()):
            raise ValueError("its archive is compressed, which torch.save does not do")
        index = next((name for name in infos if name.endswith("/data.pkl")), "")
        folder = index.removesuffix("data.pkl")
        if infos[index].file_size > _MAX_PICKLE_BYTES:
            raise ValueError(_UNREAD)
        if f"{folder}byteorder" in infos and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("its values are big-endian: write it on another machine")
        view = _interpreted(archive.read(index))
        stored = archive.read(f"{folder}data/{view.key}")
    start = view.offset * _ITEM_BYTES[view.dtype]
    return _checked(view.dtype, view.shape, stored[start : start + prod(view.shape) * _ITEM_BYTES[view.dtype]])


def _check_directory(file: bytes) -> None:
    """Raise `ValueError` for an archive with a large directory: each of its entries would become an object."""
    end = file[-_EOCD_BYTES:]
    if len(end) < _EOCD_BYTES or not end.startswith(b"PK\5\6") or not end.endswith(b"\0\0"):
        raise ValueError(_UNREAD)
    sizes = [unpack_from("<I", end, 12)[0]]
    if file[-_EOCD_BYTES - 20 :].startswith(b"PK\6\7"):
        wide = file[-_ZIP64_BYTES:]
        if len(wide) < _ZIP64_BYTES or not wide.startswith(b"PK\6\6"):
            raise ValueError(_UNREAD)
        sizes.append(unpack_from("<Q", wide, 40)[0])
    if max(sizes) > _MAX_INDEX_BYTES:
        raise ValueError(_UNREAD)


def _checked(dtype: str, shape: Sequence[int], data: bytes) -> TensorFile:
    """Return a tensor. Raises `ValueError` unless the data has as many bytes as the shape says."""
    if len(shape) > 4 or any(size < 1 for size in shape) or prod(shape) * _ITEM_BYTES[dtype] != len(data):
        raise ValueError(f"its shape {list(shape)[:8]} does not fit its {len(data)} bytes of {dtype}")
    return TensorFile(dtype, tuple(shape), data)


class _Storage(NamedTuple):
    dtype: str
    key: str


class _View(NamedTuple):
    """The part of a storage that a tensor shows. `offset` is in values."""

    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]


class _Global(NamedTuple):
    name: str


class _Mark(NamedTuple):
    """Begins a tuple on the stack."""


def _interpreted(pickle: bytes) -> _View:
    """Return the tensor that a pickle of `torch.save` describes. Raises `ValueError`, `KeyError` or `IndexError` for
    another one."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    try:
        instructions = list(pickletools.genops(pickle))
    except ValueError as exc:
        raise ValueError(_UNREAD) from exc
    for opcode, argument, _ in instructions:
        if opcode.name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif opcode.name == "STOP":
            break
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode.name != "PROTO":
            stack.append(_value(opcode.name, argument, stack))
    if len(stack) != 1 or not isinstance(stack[0], _View):
        raise ValueError(_UNREAD)
    return stack[0]


def _value(name: str, argument: Any, stack: list[Any]) -> Any:
    """Return what an instruction puts on the stack, after it has taken its operands from there. Raises `ValueError` for
    an instruction that torch.save does not write for a tensor."""
    match name:
        case "GLOBAL":
            return _Global(str(argument))
        case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
            return argument
        case "NEWFALSE" | "NEWTRUE":
            return name == "NEWTRUE"
        case "MARK":
            return _Mark()
        case "EMPTY_TUPLE":
            return ()
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            return _popped(stack, int(name[-1]))
        case "TUPLE":
            mark = [at for at, one in enumerate(stack) if isinstance(one, _Mark)][-1]
            items = _popped(stack, len(stack) - 1 - mark)
            stack.pop()
            return items
        case "BINPERSID":
            return _storage(stack.pop())
        case "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            return _called(function, arguments)
        case _:
            raise ValueError(_UNREAD)


def _popped(stack: list[Any], count: int) -> tuple[Any, ...]:
    """Remove the last `count` items of the stack, and return them."""
    if count > len(stack):
        raise ValueError(_UNREAD)
    items = tuple(stack[len(stack) - count :])
    del stack[len(stack) - count :]
    return items


def _storage(stated: Any) -> _Storage:
    match stated:
        case ("storage", _Global(name), str(key), str(_), int(_)) if name in _STORAGES:
            return _Storage(_STORAGES[name], key)
        case ("storage", _Global(name), *_):
            raise ValueError(f"its values are {name[:40]!r}; they must be {', '.join(_ITEM_BYTES)}")
        case _:
            raise ValueError(_UNREAD)


def _called(function: Any, arguments: Any) -> Any:
    """Return what one of the two known functions makes of its arguments. Raises `ValueError` for any other function."""
    match function, arguments:
        case _Global(name), () if name == _HOOKS:
            return _HOOKS
        case _Global(name), (
            _Storage(dtype, key),
            int(offset),
            tuple(shape),
            tuple(strides),
            bool(_),
            str(_),
        ) if name == _REBUILD:
            if not all(type(one) is int for one in (*shape, *strides)) or offset < 0:
                raise ValueError(_UNREAD)
            if any(
                size > 1 and step != prod(shape[at + 1 :])
                for at, (size, step) in enumerate(zip(shape, strides, strict=True))
            ):
                raise ValueError("its values do not lie one after another: save tensor.contiguous()")
            return _View(dtype, key, offset, shape)
        case _:
            raise ValueError(_UNREAD)
