"""Which encode instance encodes an image."""

from msgspec.structs import replace

from baton_serve.contracts.block_layout import embedding_layout
from baton_serve.contracts.identity import InstanceId
from baton_serve.contracts.media import MediaSpan, source_span
from baton_serve.services.router.placement.encode_workers import MAX_QUEUE_S, Encoder, assign_images
from baton_serve.services.router.placement.policy import ClusterView, Demand, Placement, place
from tests.unit.router.test_policy import ALWAYS, candidate

LAYOUT = embedding_layout("weights", width=8, dtype="float32")
A, B, C = (bytes([number] * 32) for number in range(3))
MEDIA = [MediaSpan(10, 20, A), MediaSpan(40, 20, B), MediaSpan(70, 20, C), MediaSpan(100, 20, A)]
FILES = [(A,), (B,), (C,)]


def encoder(name: str, queued: int = 0, *held: bytes, weights: str = "weights") -> Encoder:
    layout = embedding_layout(weights, width=8, dtype="float32")
    return Encoder(instance=InstanceId(name), layout=layout, queued_images=queued, held=frozenset(held))


def test_an_image_goes_to_the_instance_that_has_its_embeddings_however_busy_it_is() -> None:
    found = assign_images(MEDIA[:1], FILES, [encoder("idle"), encoder("busy", 9, A)], LAYOUT, cached_tokens=0)
    assert found == {"busy": (A,)}


def test_the_images_of_a_prompt_are_divided_and_each_is_encoded_once() -> None:
    found = assign_images(MEDIA, FILES, [encoder("one"), encoder("two", 1)], LAYOUT, cached_tokens=0)
    assert found == {"one": (A, B), "two": (C,)}


def test_images_whose_kv_is_cached_are_not_encoded() -> None:
    assert assign_images(MEDIA[:3], FILES, [encoder("one")], LAYOUT, cached_tokens=60) == {"one": (C,)}
    assert assign_images(MEDIA[:3], FILES, [encoder("one")], LAYOUT, cached_tokens=59) == {"one": (B, C)}
    assert assign_images(MEDIA, FILES, [encoder("one")], LAYOUT, cached_tokens=120) == {}


def test_an_overloaded_instance_gets_no_images_except_those_that_it_has() -> None:
    busy = [replace(encoder("one", 30), queue_s=MAX_QUEUE_S + 1), replace(encoder("two", 40, B), queue_s=90.0)]
    assert assign_images(MEDIA, FILES, busy, LAYOUT, cached_tokens=0) == {"two": (B,)}


def test_embeddings_of_other_weights_are_of_no_use() -> None:
    encoders = [encoder("old", weights="old")]
    assert assign_images(MEDIA, FILES, encoders, LAYOUT, cached_tokens=0) == {}
    assert assign_images(MEDIA, FILES, encoders, None, cached_tokens=0) == {}


def test_the_spans_of_a_video_go_to_one_instance_and_files_without_spans_to_none() -> None:
    """An instance that decodes a video for one of its spans has all spans."""
    files = [(A, B), (), (C,)]
    instances = [encoder("one"), encoder("two", 1, A)]
    assert assign_images(MEDIA, files, instances, LAYOUT, cached_tokens=0) == {"one": (A, B), "two": (C,)}
    assert assign_images(MEDIA, files, instances, LAYOUT, cached_tokens=60) == {"one": (A, B), "two": (C,)}
    assert assign_images(MEDIA, files, [encoder("two", 9, A, B), encoder("one")], LAYOUT, cached_tokens=0) == {
        "two": (A, B),
        "one": (C,),
    }


def test_a_source_is_encoded_unless_all_of_its_kv_is_cached() -> None:
    demand = Demand(
        num_tokens=1504, max_new_tokens=9, source_tokens=1500, has_images=True, media=[source_span(A)], files=[(A,)]
    )
    for held_tokens, expected in ((0, {"one": (A,)}), (1499, {"one": (A,)}), (1500, {})):
        worker = candidate("u0", "unified", embedding_layout=LAYOUT, held_tokens=held_tokens, total_blocks=1000)
        placement = place(demand, ClusterView([worker], encoders=[encoder("one")]), ALWAYS)
        assert isinstance(placement, Placement)
        assert placement.encoding == expected
