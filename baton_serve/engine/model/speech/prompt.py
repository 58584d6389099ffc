"""Windows of audio of the prompts that an engine computes. They are encoded by the first step of a sequence whose
source has no cached blocks.
"""

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from baton_serve.contracts.messages import Work
from baton_serve.engine.core.scheduler import ScheduledBatch
from baton_serve.engine.core.sequence import Request, Sequence
from baton_serve.engine.errors import RequestError
from baton_serve.engine.model.batch_inputs import ImageRows, SourceRows
from baton_serve.engine.model.speech.audio_reader import HFAudioReader
from baton_serve.engine.model.speech.encoder import SpeechEncoder
from baton_serve.engine.model.vision.placeholders import Pixels


class PromptAudio:
    """Implements `PromptImages` for windows of audio, and encodes them for steps. Engine thread only."""

    def __init__(self, encoder: SpeechEncoder, block_tokens: int) -> None:
        self._encoder = encoder
        self._block_tokens = block_tokens
        # Entries disappear with their requests, however these end.
        self._windows: WeakKeyDictionary[Request, Tensor] = WeakKeyDictionary()

    @property
    def reader(self) -> HFAudioReader:
        """Decodes windows of audio; usable from any thread."""
        return self._encoder.reader

    @property
    def are_whole(self) -> bool:
        """Return False: no token stands for audio."""
        return False

    def check(self, work: Work, pixels: Pixels) -> None:
        """Check that the window of a request was sent with it. Raises `RequestError`."""
        if any(span.digest not in pixels for span in work.media):
            raise RequestError("invalid", "the window of audio was not sent with the request")

    def give(self, request: Request, pixels: Pixels) -> None:
        """Attach a window to a request. It is kept until the request ends: its blocks may be evicted meanwhile."""
        # From now on the whole prompt can be computed here, whatever is cached.
        request.has_images = True
        self._windows[request] = pixels[request.work.media[0].digest].inputs["input_features"]

    def rows(self, plan: ScheduledBatch) -> list[ImageRows]:
        """Return an empty list: no token stands for audio."""
        return []

    def encoded(self, plan: ScheduledBatch) -> list[SourceRows]:
        """Return the encoder's output for each sequence of a step whose source is not cached, with the places in the KV
        cache to which its keys and values belong; empty if all sources are cached.
        """
        waiting = [chunk.sequence for chunk in plan.chunks if chunk.sequence.must_encode]
        if not waiting:
            return []
        # Sequences of one step may have the same audio, which is then encoded once.
        windows = {_digest(sequence): self._windows[sequence.request] for sequence in waiting}
        states = dict(zip(windows, self._encoder.encode(list(windows.values())), strict=True))
        found = ((sequence, states[_digest(sequence)]) for sequence in waiting)
        return [SourceRows(self._slots(sequence, len(rows)), rows) for sequence, rows in found]

    def _slots(self, sequence: Sequence, count: int) -> Tensor:
        """Return the places in the KV cache of the `count` positions of a sequence's source, int64 [count]."""
        blocks = np.array(sequence.source_blocks, dtype=np.int64)[:, None] * self._block_tokens
        # The last block may have more places than there are positions left.
        slots = (blocks + np.arange(self._block_tokens)).reshape(-1)[:count]
        return torch.from_numpy(slots).to(self._encoder.device, non_blocking=True)


def _digest(sequence: Sequence) -> bytes:
    """Return the digest of a sequence's window."""
    return sequence.request.work.media[0].digest
