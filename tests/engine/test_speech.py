"""Windows of audio in prompts: greedy tokens equal those of transformers' own Whisper, on one engine and through a
handoff, and an audio seen before is not encoded again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton_serve.audio_samples import Samples, resampled
from baton_serve.contracts.block_hash import cross_hashes
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.media import digest_of, source_span
from baton_serve.contracts.messages import Work
from baton_serve.contracts.sampling import TranscriptSpec
from baton_serve.engine import ConfigError, Engine, EngineConfig, RequestError
from baton_serve.engine.core.outputs import FailedRequest, StepResult
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.kv.kv_cache import KVMemoryKind
from baton_serve.engine.model.batch_inputs import SourceRows
from baton_serve.engine.model.speech.encoder import SpeechEncoder
from baton_serve.engine.model.speech.prompt_audio import PromptAudio
from baton_serve.engine.model.vision.image_types import NO_PIXELS, EncodedImage
from baton_serve.engine.pooling.encode_engine import ImageEncoder
from baton_serve.engine.step.in_flight import InFlightStep
from baton_serve.kvtransfer import HostMemory
from tests.engine.conftest import FakeCapture
from tests.engine.driving import Answers, hand_over, make_engine, make_work, place_kv_caches, run
from tests.engine.rank_threads import use_threads
from tests.engine.test_image_encoder import Observer, encode
from tests.speech import (
    EOS_ID,
    FIRST_SUPPRESSED,
    IDS,
    PROMPT,
    SUPPRESSED,
    TIMED_PROMPT,
    WINDOW_S,
    Reference,
    tones,
    wav,
    write_tiny_whisper,
)

COUNT = 20
TWO_RANKS, TWO_STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
TRANSCRIPT = TranscriptSpec(
    suppressed=SUPPRESSED, first_suppressed=FIRST_SUPPRESSED, first_timestamp=IDS["<|0.00|>"], end_token=EOS_ID
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_whisper(tmp_path_factory.mktemp("speech") / "m")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with make_engine(folder, reads_images=True) as made:
        yield made


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Iterator[Engine]:
    """An engine without an encoder, as on decode instances."""
    with make_engine(folder) as made:
        yield made


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of windows of each run of the encoder."""
    counts: list[int] = []
    own = SpeechEncoder.encode

    def encode(self: SpeechEncoder, windows: list[Any]) -> list[Any]:
        counts.append(len(windows))
        return own(self, windows)

    monkeypatch.setattr(SpeechEncoder, "encode", encode)
    return counts


def work_of(engine: Engine, name: str, file: bytes, prompt: list[int] = PROMPT, **options: Any) -> Work:
    sampling = {"max_tokens": COUNT, "transcript": TRANSCRIPT, **options}
    work = make_work(engine, name, prompt, **sampling)
    return msgspec.structs.replace(work, media=[source_span(digest_of(file))])


def ask(engine: Engine, files: dict[str, bytes], **options: Any) -> Answers:
    assert engine.image_reader is not None
    for name, file in files.items():
        work = work_of(engine, name, file, **options)
        engine.add(work, pixels=engine.image_reader.read([file]))
    return run(engine)


def test_tokens_of_a_batch_of_windows_equal_transformers(engine: Engine, reference: Reference) -> None:
    files = {f"w{number}": wav(tones(number)) for number in range(4)}
    expected = {(f"w{n}", 0): reference.answer(tones(n), COUNT) for n in range(4)}
    assert ask(engine, files) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > 2


def test_sources_of_one_step_are_stored_in_groups(
    engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group costs two products and a write in every layer, however many windows it has."""
    groups: list[int] = []
    own = PromptAudio.encoded

    def encoded(self: PromptAudio, plan: ScheduledBatch) -> list[SourceRows]:
        found = own(self, plan)
        groups.extend(len(rows.states) // (WINDOW_S * 50) for rows in found)
        return found

    monkeypatch.setattr(PromptAudio, "encoded", encoded)
    numbers = [70, 71, 70, 72, 73, 74]
    answers = ask(engine, {f"s{place}": wav(tones(number)) for place, number in enumerate(numbers)})
    assert answers == {(f"s{place}", 0): reference.answer(tones(n), COUNT) for place, n in enumerate(numbers)}
    assert groups == [4, 2]


def test_a_prompt_in_chunks_with_earlier_text_equals_transformers(folder: Path, reference: Reference) -> None:
    prompt = [IDS["<|startofprev|>"], *range(65, 105), *PROMPT]
    with make_engine(folder, reads_images=True, max_num_seqs=8, max_num_batched_tokens=16) as engine:
        answers = ask(engine, {"long": wav(tones(5))}, prompt=prompt)
    assert answers == {("long", 0): reference.answer(tones(5), COUNT, prompt=prompt)}


def test_timestamps_equal_transformers(engine: Engine, reference: Reference) -> None:
    transcript = msgspec.structs.replace(TRANSCRIPT, has_timestamps=True, max_first_timestamp=50)
    files = {f"t{number}": wav(tones(number)) for number in range(4)}
    answers = ask(engine, files, prompt=TIMED_PROMPT, transcript=transcript)
    expected = {(f"t{n}", 0): reference.answer(tones(n), COUNT, prompt=TIMED_PROMPT, timestamps=True) for n in range(4)}
    assert answers == expected
    assert all(tokens[0] >= IDS["<|0.00|>"] for tokens in answers.values())


def test_audio_seen_before_is_not_encoded_again(engine: Engine, encoded: list[int]) -> None:
    file = wav(tones(20))
    first = ask(engine, {"a": file, "b": file})
    second = ask(engine, {"c": file}, sequences=2)
    assert list(first.values()) + list(second.values()) == [first["a", 0]] * 4
    assert encoded == [1]


def test_a_handoff_needs_no_encoder_at_the_decode_engine(
    engine: Engine, decoder: Engine, reference: Reference, encoded: list[int]
) -> None:
    assert decoder.image_reader is None
    assert engine.image_reader is not None
    for name, number in (("first", 30), ("again", 30), ("other", 31)):
        file = wav(tones(number))
        answers = hand_over(engine, decoder, work_of(engine, name, file), engine.image_reader.read([file]))
        assert answers == {(name, 0): reference.answer(tones(number), COUNT)}
    assert encoded == [1, 1]
    # The decode engine has the source now, and computes prompts with it by itself if a later handoff fails.
    assert decoder.reserve(work_of(decoder, "alone", wav(tones(31)))) is not None
    decoder.admit_locally(RequestId("alone"))
    assert run(decoder) == {("alone", 0): reference.answer(tones(31), COUNT)}
    assert encoded == [1, 1]


def test_an_unknown_source_fails_at_the_decode_engine(decoder: Engine) -> None:
    work = work_of(decoder, "unknown", wav(tones(40)))
    with pytest.raises(RequestError, match="other encoder"):
        decoder.add(work)
    assert decoder.reserve(work) is not None
    decoder.admit_locally(work.request_id)
    failures: list[FailedRequest] = []
    run(decoder, lambda result: failures.extend(result.failed))
    assert [failed.code for failed in failures] == ["overloaded"]


def test_outputs_of_an_encode_instance_take_the_place_of_the_encoder(
    folder: Path, engine: Engine, reference: Reference, encoded: list[int]
) -> None:
    """One step may have windows of both kinds. Outputs of another size are refused."""
    files = {number: wav(tones(number)) for number in (90, 91, 92)}
    encoder = window_encoder(folder)
    assert engine.image_reader is not None
    assert engine.image_reader.embedding_layout == encoder.layout
    outputs = encode(encoder, "encode", [files[90], files[91]])
    encoder.close()
    assert encoded == [1, 2], "silence, and two windows together"
    sent = {**outputs, **engine.image_reader.read([files[92]])}
    for number, file in files.items():
        engine.add(work_of(engine, f"e{number}", file), pixels={digest_of(file): sent[digest_of(file)]})
    assert run(engine) == {(f"e{number}", 0): reference.answer(tones(number), COUNT) for number in files}
    assert encoded == [1, 2, 1]
    short = EncodedImage(torch.zeros(3, 32), 0, 0)
    with pytest.raises(RequestError, match="3 positions, not 200"):
        engine.add(work_of(engine, "short", files[90]), pixels={digest_of(files[90]): short})


def test_windows_of_several_requests_are_encoded_together(folder: Path, encoded: list[int]) -> None:
    encoder = window_encoder(folder)
    waiting = add_windows(encoder, {"a": 93, "b": 94, "again": 93, "c": 95})
    assert [encoder.step().held for _ in range(2)] == [waiting[:2], waiting[2:]]
    assert encoded == [1, 2, 1]
    assert not encoder.has_work()
    encoder.check_invariants()
    encoder.close()


@pytest.mark.parametrize("most", [0, 1])
def test_windows_that_need_too_much_memory_together_are_encoded_one_by_one(
    folder: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, own = window_encoder(folder), SpeechEncoder.encode

    def encode(self: SpeechEncoder, windows: list[torch.Tensor]) -> list[torch.Tensor]:
        if len(windows) > most:
            raise torch.OutOfMemoryError("full")
        return own(self, windows)

    monkeypatch.setattr(SpeechEncoder, "encode", encode)
    waiting = add_windows(encoder, {"a": 96, "b": 97})
    result = encoder.step()
    assert (result.held, [one.request_id for one in result.failed]) == ((waiting, []) if most else ([], waiting))
    assert not encoder.has_work()
    encoder.check_invariants()
    encoder.close()


def window_encoder(folder: Path) -> ImageEncoder:
    """Return the engine of an encode instance for the model in a folder."""
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
    return ImageEncoder(config, lambda layout: HostMemory(17, layout.block_bytes), observer=Observer())


def add_windows(encoder: ImageEncoder, numbers: dict[str, int]) -> list[RequestId]:
    """Add requests of these names, each with one window of tones, and return their ids."""
    for name, number in numbers.items():
        file = wav(tones(number))
        encoder.claim(RequestId(name), BlockHash(b"r" * 16), [digest_of(file)])
        encoder.add(RequestId(name), encoder.reader.read([file]))
    return [RequestId(name) for name in numbers]


def test_preempted_sequences_continue_as_undisturbed_ones(folder: Path, reference: Reference) -> None:
    count = 60
    files = {f"p{number}": wav(tones(50 + number)) for number in range(3)}
    # Room for three sources and few tokens: sequences are preempted as they grow.
    with make_engine(folder, reads_images=True, num_gpu_blocks_override=13 * 3 + 9) as engine:
        answers = ask(engine, files, max_tokens=count)
        assert engine.stats().preemptions
    assert answers == {(f"p{n}", 0): reference.answer(tones(50 + n), count) for n in range(3)}


def test_blocks_of_sources_pass_through_the_host_tier(folder: Path, reference: Reference, encoded: list[int]) -> None:
    with make_engine(folder, reads_images=True, num_gpu_blocks_override=22, host_kv_bytes=4 << 20) as engine:
        for name, number in (("a", 60), ("b", 61), ("c", 60)):
            answers = ask(engine, {name: wav(tones(number))})
            assert answers == {(name, 0): reference.answer(tones(number), COUNT)}
    # One run belongs to the start of the engine.
    assert encoded == [1, 1, 1]


def test_two_ranks_hold_half_of_each_source_and_exchange_it_with_one(
    folder: Path, engine: Engine, decoder: Engine, reference: Reference, encoded: list[int]
) -> None:
    """Rank 0 encodes and sends the output. Blocks of a source are cached, handed off and preempted as others."""
    expected = {number: reference.answer(tones(number), COUNT) for number in (80, 81)}
    with make_engine(folder, reads_images=True, tensor_parallel_size=2, async_scheduling=True) as two:
        assert two.layout == decoder.layout
        files = {f"r{number}": wav(tones(number)) for number in (80, 81)}
        assert ask(two, files) == {(f"r{number}", 0): tokens for number, tokens in expected.items()}
        # Of the start, and of both windows together.
        assert encoded == [1, 2]
        assert ask(two, {"again": files["r80"]}) == {("again", 0): expected[80]}
        assert two.image_reader is not None and engine.image_reader is not None
        for source, sink, number in ((two, decoder, 82), (engine, two, 83)):
            file = wav(tones(number))
            pixels = source.image_reader.read([file]) if source.image_reader is not None else NO_PIXELS
            answers = hand_over(source, sink, work_of(source, f"over {number}", file), pixels)
            assert answers == {(f"over {number}", 0): reference.answer(tones(number), COUNT)}


@pytest.mark.parametrize("settings", [TWO_RANKS, TWO_STAGES], ids=["ranks", "stages"])
def test_graphs_of_two_ranks(
    settings: dict[str, Any],
    folder: Path,
    reference: Reference,
    captured: FakeCapture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_threads(monkeypatch)
    with make_engine(folder, reads_images=True, max_num_seqs=4, **settings) as engine:
        files = {f"g{number}": wav(tones(number)) for number in range(3)}
        answers = ask(engine, files)
        assert sum(graph.replays for graph in captured.graphs) >= 2 * (COUNT - 1)
    assert answers == {(f"g{n}", 0): reference.answer(tones(n), COUNT) for n in range(3)}


@pytest.mark.parametrize(
    ("settings", "place"),
    [(TWO_STAGES, "shared"), ({"pipeline_parallel_size": 3}, "mirrored"), (TWO_STAGES | TWO_RANKS, "mirrored")],
    ids=["2 stages", "3 stages", "2 stages of 2 ranks"],
)
@pytest.mark.usefixtures("threaded_ranks")
def test_stages_keep_the_sources_of_their_layers(
    settings: dict[str, Any],
    place: KVMemoryKind,
    folder: Path,
    engine: Engine,
    decoder: Engine,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks, with sources of several steps in the stages, and by handoffs in both ways."""
    place_kv_caches(monkeypatch, place)
    prompt = [IDS["<|startofprev|>"], *range(65, 105), *PROMPT]
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
    with make_engine(folder, reads_images=True, **small, **settings) as stages:
        assert stages.layout == decoder.layout
        files = {f"r{number}": wav(tones(number)) for number in range(100, 106)}
        expected = {(f"r{n}", 0): reference.answer(tones(n), COUNT, prompt=prompt) for n in range(100, 106)}
        assert ask(stages, files, prompt=prompt) == expected
        assert ask(stages, {"again": files["r100"]}, prompt=prompt) == {("again", 0): expected["r100", 0]}
        assert engine.image_reader is not None
        for number, source, sink in ((107, stages, decoder), (108, engine, stages)):
            file = wav(tones(number))
            work = work_of(source, f"over {number}", file)
            answers = hand_over(source, sink, work, engine.image_reader.read([file]))
            assert answers == {(f"over {number}", 0): reference.answer(tones(number), COUNT)}


@pytest.mark.usefixtures("threaded_ranks")
def test_rank_0_of_all_stages_encodes_alone(folder: Path, encoded: list[int]) -> None:
    with make_engine(folder, reads_images=True, **TWO_STAGES) as stages:
        assert encoded == [1], "silence, at the start"
        for name in ("first", "again"):
            ask(stages, {name: wav(tones(109))})
        assert encoded == [1, 1]


@pytest.mark.usefixtures("threaded_ranks")
def test_a_source_is_not_pinned_before_all_stages_have_it(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(folder, reads_images=True, **TWO_STAGES) as stages:
        assert stages.image_reader is not None
        file = wav(tones(110))
        work = work_of(stages, "w", file)
        names = cross_hashes(work.root, digest_of(file), stages.layout.source_blocks)
        pinned, choose = list[int](), stages._steps._choose

        def pin_and_choose(launched: InFlightStep, result: StepResult) -> InFlightStep | None:
            pinned.append(len(stages.pin(RequestId("pin"), names)))
            stages.unpin(RequestId("pin"))
            return choose(launched, result)

        monkeypatch.setattr(stages._steps, "_choose", pin_and_choose)
        stages.add(work, pixels=stages.image_reader.read([file]))
        assert run(stages) == {("w", 0): reference.answer(tones(110), COUNT)}
        assert pinned[0] == 0 and pinned[-1] == len(names)


def test_captured_graphs_give_the_tokens_of_transformers(
    folder: Path, reference: Reference, captured: FakeCapture
) -> None:
    with make_engine(folder, reads_images=True, max_num_seqs=4, async_scheduling=True) as engine:
        assert len(captured.graphs) == 3  # for 4, 2 and 1 sequences; none for prompts
        files = {f"g{number}": wav(tones(number)) for number in range(3)}
        answers = ask(engine, files)
        # Sequences whose tokens are sampled by rules replay graphs too, and read their logits.
        assert sum(graph.replays for graph in captured.graphs) >= COUNT - 1
    assert answers == {(f"g{n}", 0): reference.answer(tones(n), COUNT) for n in range(3)}


def test_a_language_is_detected_by_one_token(engine: Engine, reference: Reference) -> None:
    languages = [IDS["<|en|>"], IDS["<|de|>"], IDS["<|fr|>"]]
    found = ask(
        engine, {"d": wav(tones(3))}, prompt=PROMPT[:1], max_tokens=1, allowed_token_ids=languages, transcript=None
    )
    others = [token for token in range(len(IDS) + 271) if token not in languages]
    expected = reference.answer(tones(3), 1, prompt=PROMPT[:1], suppress_tokens=others, begin_suppress_tokens=None)
    assert found == {("d", 0): expected}


def test_windows_that_cannot_be_read_are_refused(engine: Engine) -> None:
    assert engine.image_reader is not None
    for file in (
        b"RIFF",
        b"",
        wav(tones(0, 4.5)),
        wav(tones(0, 1.0), rate_hz=15_999),
        wav(tones(0, 1.0), rate_hz=384_000),
        wav(np.zeros((100, 9), dtype=np.int16)),
        wav(np.zeros(0, dtype=np.int16)),
    ):
        with pytest.raises(RequestError, match="cannot be read"):
            engine.image_reader.read([file])


def test_requests_without_their_audio_are_refused(engine: Engine, folder: Path) -> None:
    with pytest.raises(RequestError, match="one window of audio"):
        engine.add(make_work(engine, "text", PROMPT))
    with pytest.raises(RequestError, match="was not sent"):
        engine.add(work_of(engine, "absent", wav(tones(0))), pixels=NO_PIXELS)
    with pytest.raises(ConfigError, match="cross-attention"):
        make_engine(folder, enable_lora=True)


def test_other_rates_and_channels_are_converted(engine: Engine, reference: Reference) -> None:
    rate = 22_050
    stereo = np.stack([tones(4, rate_hz=rate)] * 2, axis=1)
    answers = ask(engine, {"s": wav(stereo, rate)})
    mono = resampled(floats(tones(4, rate_hz=rate)), rate, 16_000)
    assert answers == {("s", 0): reference.answer(np.rint(mono * 32768).astype(np.int16), COUNT)}


def floats(samples: Any) -> Samples:
    return np.asarray(samples / 32768.0, dtype=np.float32)


def test_resampling_keeps_a_tone_and_drops_what_the_lower_rate_cannot_have() -> None:
    times = np.arange(48_000) / 48_000
    low = resampled(floats(20_000 * np.sin(2 * np.pi * 1000 * times)), 48_000, 16_000)
    expected = 20_000 / 32768 * np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    assert np.abs(low - expected)[200:-200].max() < 2e-3
    high = resampled(floats(20_000 * np.sin(2 * np.pi * 9000 * times)), 48_000, 16_000)
    assert np.abs(high)[200:-200].max() < 2e-3
