"""The engine of an encode instance: embeddings give the same tokens, are shared, evicted and checked."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.events import BlocksRemoved
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.media import digest_of
from baton_serve.engine import EngineConfig
from baton_serve.engine.errors import ConfigError
from baton_serve.engine.model.vision.image_types import EncodedImage, Pixels
from baton_serve.engine.pooling.encode_engine import ImageEncoder
from baton_serve.kvtransfer import HostMemory
from tests.engine.driving import make_engine, run
from tests.engine.rank_threads import use_threads
from tests.engine.test_vision import COUNT, TWO, work_of
from tests.images import Reference, picture
from tests.tiny_models import IMAGE_TOKENS, write_tiny_llava, write_tiny_model

ROOT = BlockHash(b"r" * 16)
IMAGES = [picture(number) for number in range(4)]


class Observer:
    def __init__(self) -> None:
        self.num_computed = self.num_found = self.num_damaged = 0

    def computed(self, seconds: float) -> None:
        self.num_computed += 1

    def found(self, num_images: int) -> None:
        self.num_found += num_images

    def damaged(self) -> None:
        self.num_damaged += 1


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("llava"))


Make = Callable[..., tuple[ImageEncoder, Observer]]


@pytest.fixture
def encoder(llava: Path) -> Iterator[Make]:
    made: list[ImageEncoder] = []

    def make(num_blocks: int = 8) -> tuple[ImageEncoder, Observer]:
        def blocks(layout: KVLayout) -> HostMemory:
            return HostMemory(1 + num_blocks, layout.block_bytes)

        observer = Observer()
        config = EngineConfig(model=str(llava), device="cpu", dtype="float32")
        made.append(ImageEncoder(config, blocks, observer=observer))
        return made[-1], observer

    yield make
    for one in made:
        one.check_invariants()
        one.close()


def encode(engine: ImageEncoder, name: str, files: Sequence[bytes], *, root: BlockHash = ROOT) -> Pixels:
    """Encode files as an instance does, and read their rows from the blocks."""
    request_id, by_digest = RequestId(name), {digest_of(file): file for file in files}
    lacking = engine.claim(request_id, root, list(by_digest))
    if lacking:
        engine.add(request_id, engine.reader.read(by_digest[digest] for digest in lacking))
        held: list[RequestId] = []
        while engine.has_work():
            held += engine.step().held
        assert request_id in held
    found: dict[bytes, EncodedImage] = {}
    for shape, blocks in engine.blocks_of(request_id):
        assert engine.memory.host_view is not None
        size = engine.layout.block_bytes
        data = b"".join(engine.memory.host_view[one.block * size : (one.block + 1) * size] for one in blocks)
        rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, engine.layout.head_dim)
        found[shape.digest] = EncodedImage(rows[: shape.num_rows], shape.width, shape.height)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_from_embeddings_equal_transformers(
    llava: Path, encoder: Make, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks too: rank 0 sends the rows to the other one."""
    engine, _ = encoder()
    embeddings = encode(engine, "a", [piece for piece in TWO if isinstance(piece, bytes)])
    use_threads(monkeypatch)
    with make_engine(llava, reads_images=True, tensor_parallel_size=ranks) as prefill:
        assert prefill.image_reader is not None
        assert prefill.image_reader.embedding_layout == engine.layout
        prefill.add(work_of(prefill, "x", TWO), pixels=embeddings)
        assert run(prefill)["x", 0] == Reference(llava).answer(TWO, COUNT)


def test_an_image_is_encoded_once_for_all_requests_of_a_tenant(encoder: Make) -> None:
    engine, counts = encoder()
    first, waiting = RequestId("first"), RequestId("waiting")
    files = {digest_of(file): file for file in IMAGES[:2]}
    for request_id in (first, waiting):  # both lack the images when they come
        engine.add(request_id, engine.reader.read(files[one] for one in engine.claim(request_id, ROOT, list(files))))
    held = [one for _ in range(4) for one in engine.step().held]
    assert held == [first, waiting]
    assert engine.blocks_of(first) == engine.blocks_of(waiting)
    assert engine.claim(RequestId("later"), ROOT, list(files)) == []
    assert (counts.num_computed, counts.num_found) == (2, 4)
    assert engine.claim(RequestId("another tenant"), BlockHash(b"s" * 16), list(files)) == list(files)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.prefix_hit_tokens) == (2 * IMAGE_TOKENS, 4 * IMAGE_TOKENS)


def test_images_are_reported_one_by_one_and_those_that_are_decoded_first_go_first(encoder: Make) -> None:
    """A request with a long video is claimed long before its frames are there."""
    engine, _ = encoder()
    slow, quick = RequestId("slow"), RequestId("quick")
    files = {digest_of(file): file for file in IMAGES[:2]}
    pixels = [engine.reader.read([file]) for file in IMAGES[:3]]
    assert engine.claim(slow, ROOT, list(files)) == list(files)
    assert engine.claim(quick, ROOT, list(pixels[2])) == list(pixels[2])
    engine.add(quick, pixels[2])
    engine.add(slow, pixels[0])
    steps = [engine.step(), engine.step()]
    assert not engine.has_work()
    engine.add(slow, pixels[1])
    steps.append(engine.step())
    assert [step.held for step in steps] == [[quick], [], [slow]]
    assert [[(one.request_id, one.shape.digest) for one in step.encoded] for step in steps] == [
        [(quick, digest_of(IMAGES[2]))],
        [(slow, digest_of(IMAGES[0]))],
        [(slow, digest_of(IMAGES[1]))],
    ]
    assert engine.blocks_of(slow) == [(one.shape, one.blocks) for step in steps[1:] for one in step.encoded]


def test_the_oldest_embeddings_make_room_and_images_in_use_wait_for_it(encoder: Make) -> None:
    engine, counts = encoder(num_blocks=2)
    names = [RequestId(str(number)) for number in range(3)]
    encode(engine, names[0], IMAGES[:1])
    encode(engine, names[1], IMAGES[1:2])
    digest = digest_of(IMAGES[2])
    assert engine.claim(names[2], ROOT, [digest]) == [digest]
    engine.add(names[2], engine.reader.read([IMAGES[2]]))
    assert engine.step().held == [] and not engine.has_work()
    engine.release(names[0])
    assert engine.has_work()
    result = engine.step()
    assert result.held == [names[2]]
    assert [type(event) for event in result.events][:1] == [BlocksRemoved]
    assert engine.claim(names[0], ROOT, [digest_of(IMAGES[0])]) == [digest_of(IMAGES[0])]
    assert counts.num_computed == 3


def test_damaged_embeddings_are_computed_again(encoder: Make) -> None:
    engine, counts = encoder()
    before = encode(engine, "a", IMAGES[:1])[digest_of(IMAGES[0])]
    ((_, blocks),) = engine.blocks_of(RequestId("a"))
    engine.release(RequestId("a"))
    assert engine.memory.host_view is not None
    engine.memory.host_view[blocks[0].block * engine.layout.block_bytes + 5] ^= 1
    after = encode(engine, "b", IMAGES[:1])[digest_of(IMAGES[0])]
    assert isinstance(before, EncodedImage) and isinstance(after, EncodedImage)
    assert torch.equal(before.features, after.features)
    assert (counts.num_computed, counts.num_damaged) == (2, 1)


def test_its_dtype_is_that_of_instances_that_compute_prompts(tmp_path: Path) -> None:
    """Configs may state it for the whole model alone. Embeddings of another dtype would never be asked for."""
    config = json.loads((write_tiny_llava(tmp_path) / "config.json").read_text())
    for part in (config["text_config"], config["vision_config"]):
        part.pop("dtype", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    alone = EngineConfig(model=str(tmp_path), device="cpu")
    engine = ImageEncoder(alone, lambda layout: HostMemory(2, layout.block_bytes), observer=Observer())
    with make_engine(tmp_path, reads_images=True, dtype="auto") as prefill:
        assert prefill.image_reader is not None
        assert prefill.image_reader.embedding_layout == engine.layout
    engine.close()


def test_a_model_without_a_tower_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_tiny_model(tmp_path)), device="cpu")
    with pytest.raises(ConfigError, match="no vision tower"):
        ImageEncoder(config, lambda layout: HostMemory(2, layout.block_bytes), observer=Observer())
