"""Decides which tokens of a transcript may follow: suppressed tokens, and Whisper's rules for timestamps.

All rules but one depend on the generated tokens only, and become a mask on the host. The last one compares
probabilities, on the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.contracts.sampling import TranscriptSpec
from baton_serve.engine.core.scheduler import SampleRow
from baton_serve.engine.sample.grammar import Bits


class TranscriptRules:
    """The rules for the tokens of one transcript, as Whisper was trained with them: which timestamps may follow.
    `width` is the size of a token mask in bytes."""

    def __init__(self, spec: TranscriptSpec, width: int) -> None:
        self._spec = spec
        self._always: NDArray[np.bool_] = np.ones(width * 8, dtype=bool)
        self._always[spec.suppressed] = False
        if spec.has_timestamps:
            # The token before the timestamps asks for a transcript without them.
            self._always[spec.first_timestamp - 1] = False

    def allowed(self, generated: Sequence[int]) -> Bits:
        """Return a bit mask of the tokens that may follow the tokens `generated` of this transcript."""
        spec, allowed = self._spec, self._always.copy()
        if not generated:
            allowed[spec.first_suppressed] = False
        if spec.has_timestamps:
            self._limit_timestamps(allowed, generated)
        return np.packbits(allowed, bitorder="little")

    def _limit_timestamps(self, allowed: NDArray[np.bool_], generated: Sequence[int]) -> None:
        """Clear in `allowed` the tokens that must not follow `generated`: timestamps come in pairs and never
        decrease."""
        # The rules are those of `WhisperTimeStampLogitsProcessor` in transformers: text stands between two times, and a
        # segment begins with the second of two neighbouring times.
        first, spec = self._spec.first_timestamp, self._spec
        if not generated:
            allowed[:first] = False
            if spec.max_first_timestamp is not None:
                allowed[first + spec.max_first_timestamp + 1 :] = False
            return
        ends_with_time = generated[-1] >= first
        ends_with_pair = ends_with_time and (len(generated) < 2 or generated[-2] >= first)
        if ends_with_pair:
            allowed[first:] = False
        elif ends_with_time:
            # The end of a segment: the next one begins, or the transcript ends.
            # In the vocabulary all text comes before the end token, and all times come behind it.
            allowed[: spec.end_token] = False
        last = max((token for token in reversed(generated) if token >= first), default=None)
        if last is not None:
            # The next segment may begin where the last one ended, but it does not end where it began.
            allowed[first : last if ends_with_time and not ends_with_pair else last + 1] = False


def prefer_timestamps(scores: Tensor, rows: Sequence[SampleRow]) -> None:
    """Exclude text where a timestamp must come: in rows of `scores` [rows, vocab_size] in which all timestamps together
    are likelier than the likeliest text token. Only rows whose request is a transcript with timestamps are changed, in
    place."""
    for number, row in enumerate(rows):
        spec = row.sequence.request.work.sampling.transcript
        if spec is not None and spec.has_timestamps:
            text, times = scores[number, : spec.first_timestamp], scores[number, spec.first_timestamp :]
            # Without a condition on the host, which would wait for the device.
            text.masked_fill_(torch.logsumexp(times, dim=0) > text.max(), float("-inf"))
