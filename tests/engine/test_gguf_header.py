"""Headers of GGUF files: the tables are those of the packages gguf and transformers, and broken files are errors."""

import json
import struct
from pathlib import Path

import gguf
import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import modeling_gguf_pytorch_utils as theirs

from baton_serve.engine import ModelError
from baton_serve.engine.loading.gguf_folder import unpack
from baton_serve.engine.loading.gguf_header import TYPES, GgufFile, GgufFormatError, read_gguf
from baton_serve.engine.loading.gguf_metadata import generation_config
from baton_serve.engine.loading.gguf_weights import tensor_names
from baton_serve.services.local.settings import DEMO_MODEL
from tests.gguf_files import Kind, projections, write_gguf, write_lone_gguf


def test_the_table_of_types_is_that_of_the_package_gguf() -> None:
    for number, (name, *sizes) in TYPES.items():
        kind = Kind(number)
        assert (kind.name, list(gguf.GGML_QUANT_SIZES[kind])) == (name, sizes)


def test_metadata_and_tensors_are_those_of_the_package_gguf(tmp_path: Path) -> None:
    file = write_lone_gguf(tmp_path / "model", Kind.Q4_K, DEMO_MODEL)
    parsed, expected = read_gguf(file), gguf.GGUFReader(file)
    stated = {key: field.contents() for key, field in expected.fields.items() if not key.startswith("GGUF.")}
    assert parsed.metadata == stated
    assert list(parsed.tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        found = parsed.tensors[tensor.name]
        assert (found.kind, found.shape) == (tensor.tensor_type.name, tuple(map(int, reversed(tensor.shape))))
        assert found.data.tobytes() == tensor.data.tobytes()


def test_sampling_defaults_are_those_of_the_file_and_else_of_llama_cpp(tmp_path: Path) -> None:
    file = write_lone_gguf(tmp_path / "model", Kind.Q8_0, DEMO_MODEL)
    unpack(file, tmp_path / "unpacked")
    written = json.loads((tmp_path / "unpacked" / "generation_config.json").read_text())
    expected = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0}
    assert written == {"do_sample": True, "eos_token_id": 2, **expected}
    stated: dict[str, object] = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    assert generation_config(GgufFile(stated, {})) | {"eos_token_id": 2} == {
        **written,
        "temperature": 0.6,
        "top_k": 20,
    }


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_names_of_tensors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", projections(Kind.Q8_0), family)
    skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    expected = theirs.get_gguf_hf_weights_map(skeleton, theirs.TensorProcessor())
    assert tensor_names(skeleton, family) == expected


def test_a_file_cut_off_anywhere_is_an_error_with_the_cause(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model", projections(Kind.Q8_0))
    whole = (tmp_path / "model" / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (5, 20, 100, 1000):
        cut.write_bytes(whole[:size])
        with pytest.raises(GgufFormatError, match="its header is longer than the file"):
            read_gguf(cut)
    cut.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match=r"cut.gguf cannot be unpacked: it ends after .*download was not complete"):
        unpack(cut, tmp_path / "unpacked")


def test_other_files_are_named_as_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    for content, cause in (
        (b"version https://git-lfs.github.com/spec/v1", "it is a pointer of Git LFS"),
        (b"PK\3\4" + bytes(100), "it is not GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "it has version 1 of the format"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "its header is longer than the file"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
    ):
        file.write_bytes(content)
        with pytest.raises(GgufFormatError, match=cause):
            read_gguf(file)


@pytest.mark.parametrize(
    ("dimensions", "sizes", "cause"),
    [
        (2**32 - 1, (), "4294967295 dimensions"),
        (5, (1, 1, 1, 1, 1), "5 dimensions"),
        (2, (0, 2**63), "cannot have"),
        (3, (32, 0, 2**63), "cannot have"),
        (2, (2**63, 2**63), "not complete"),
    ],
)
def test_a_tensor_of_impossible_dimensions_is_refused_before_they_are_read(
    dimensions: int, sizes: tuple[int, ...], cause: str, tmp_path: Path
) -> None:
    entry = struct.pack(f"<Q1sI{len(sizes)}QIQ", 1, b"t", dimensions, *sizes, 0, 0)
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + bytes(4096))
    with pytest.raises(GgufFormatError, match=cause):
        read_gguf(file)
