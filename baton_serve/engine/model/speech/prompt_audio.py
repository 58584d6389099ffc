"""Decides when the audio of a prompt is encoded: when its source has no cached blocks and no encode instance has
encoded it.
"""

from collections.abc import Collection, Mapping
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.contracts.messages import Work
from baton_serve.engine import device as devices
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.core.sequence import Request, Sequence
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.batch_inputs import ImageRows, SourceRows
from baton_serve.engine.model.speech.audio_reader import HFAudioReader
from baton_serve.engine.model.speech.encoder import MAX_BATCH, SpeechEncoder
from baton_serve.engine.model.vision.image_types import DecodedImage, EncodedImage, Pixels


class PromptAudio:
    """Keeps the windows of audio of requests and encodes them for the steps that need them. Implements `PromptImages`
    for audio. Engine thread only.
    """

    def __init__(self, encoder: SpeechEncoder, block_tokens: int, source_tokens: int) -> None:
        """`source_tokens` is the number of positions of the encoder's output for one window."""
        self._encoder = encoder
        self._block_tokens = block_tokens
        self._source_tokens = source_tokens
        self.max_rows = MAX_BATCH * source_tokens
        """The most rows of one `SourceRows`."""
        # Entries disappear with their requests, however these end.
        self._windows: WeakKeyDictionary[Request, DecodedImage | EncodedImage] = WeakKeyDictionary()

    @property
    def reader(self) -> HFAudioReader:
        """The object that turns audio files into mel features; usable from any thread."""
        return self._encoder.reader

    @property
    def are_whole(self) -> bool:
        """Return False. For images it says whether one step must compute all tokens of an image, but audio has no
        tokens.
        """
        return False

    @property
    def can_follow(self) -> bool:
        """Return False: a request has one window, without which nothing of its prompt can be computed."""
        return False

    def check(self, work: Work, pixels: Pixels, awaited: Collection[bytes] = ()) -> None:
        """Raise `RequestError` if a request's window of audio was not sent with it. `pixels` are the features that were
        sent, or the outputs of an encode instance, by digest.
        """
        for window in (pixels.get(span.digest) for span in work.media):
            if window is None:
                raise RequestError("invalid", "the window of audio was not sent with the request")
            if isinstance(window, EncodedImage) and len(window.features) != self._source_tokens:
                found = len(window.features)
                raise RequestError("internal", f"a window of audio has {found} positions, not {self._source_tokens}")

    def give(self, request: Request, pixels: Pixels, awaited: Collection[bytes] = ()) -> None:
        """Keep the mel features of a request's window of audio, or the encoder's output, until the request ends, since
        its cached cross-attention KV may be evicted meanwhile. `pixels` are both by digest.
        """
        # From now on the whole prompt can be computed here, whatever is cached.
        request.has_images = True
        self._windows[request] = pixels[request.work.media[0].digest]

    def supply(self, request: Request, pixels: Pixels) -> None:
        """Do nothing: no window follows its request."""

    def rows(self, plan: ScheduledBatch) -> list[ImageRows]:
        """Return an empty list: audio has no embeddings that replace those of tokens, as images have."""
        return []

    def encoded(self, plan: ScheduledBatch) -> list[SourceRows]:
        """Encode the windows of the sequences of a step whose cross-attention KV is not cached, unless an encode
        instance has. Return the encoder's outputs, with the KV cache positions for their keys and values; empty if all
        are cached.
        """
        waiting = [chunk.sequence for chunk in plan.chunks if chunk.sequence.must_encode]
        if not waiting:
            return []
        # Sequences of one step may have the same audio, which is then encoded once.
        windows = {_digest(sequence): self._windows[sequence.request] for sequence in waiting}
        states = self._states(windows)
        return [self._stored(waiting[at : at + MAX_BATCH], states) for at in range(0, len(waiting), MAX_BATCH)]

    def _states(self, windows: Mapping[bytes, DecodedImage | EncodedImage]) -> dict[bytes, Tensor]:
        """Return the encoder's outputs [positions, hidden] for windows, on the device, by digest."""
        states, own = dict[bytes, Tensor](), dict[bytes, Tensor]()
        for digest, window in windows.items():
            if isinstance(window, EncodedImage):
                states[digest] = devices.send(window.features, self._encoder.device)
            else:
                own[digest] = window.inputs["input_features"]
        if own:
            states.update(zip(own, self._encoder.encode(list(own.values())), strict=True))
        return states

    def _stored(self, sequences: list[Sequence], states: Mapping[bytes, Tensor]) -> SourceRows:
        """Return the encoder's outputs for some sequences, whose keys and values are then computed together. `states`
        are the outputs by digest.
        """
        rows = [states[_digest(sequence)] for sequence in sequences]
        slots = [self._slots(sequence, len(found)) for sequence, found in zip(sequences, rows, strict=True)]
        where = torch.from_numpy(np.concatenate(slots))
        return SourceRows(devices.send(where, self._encoder.device), torch.cat(rows))

    def _slots(self, sequence: Sequence, count: int) -> NDArray[np.int64]:
        """Return the KV cache positions for the cross-attention keys and values of a sequence, [count], one for each of
        the `count` positions of the encoder's output.
        """
        blocks = np.array(sequence.source_blocks, dtype=np.int64)[:, None] * self._block_tokens
        # The last block may have more places than there are positions left.
        return (blocks + np.arange(self._block_tokens)).reshape(-1)[:count]


def _digest(sequence: Sequence) -> bytes:
    """Return the digest that identifies the window of audio of a sequence."""
    return sequence.request.work.media[0].digest
