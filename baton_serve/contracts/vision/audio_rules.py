"""Defines the interface of models that read audio in chats."""

from collections.abc import Mapping
from typing import Any

import msgspec

from baton_serve.contracts.vision.media_text import MediaText, UnfitImageError


class SoundRules(msgspec.Struct, frozen=True, kw_only=True):
    """How one model reads audio. Each subclass is for one way to count embeddings; objects are made from the files of a
    model's folder."""

    token_id: int
    """The token whose embeddings are replaced by those of the audio. A chat template writes one for each audio."""
    marks: tuple[str, str]
    """Texts before and behind that token, for chat templates that take a message as one text."""
    rate_hz: int
    """Samples per second that the encoder reads."""
    hop: int
    """Samples from one spectrum to the next."""
    window_samples: int
    """Samples that the encoder reads together."""
    longest_s: float
    """Seconds that are heard at most. The rest of a longer audio is left out, or the audio is refused if
    `hears_all`."""
    call_settings: Mapping[str, Any] = {}
    """Arguments of the model's feature extractor, as transformers' processor gives them."""
    is_filled: bool = False
    """True if the encoder needs the silence up to the end of the window too."""

    @property
    def hears_all(self) -> bool:
        """Return whether the model can hear audio that is longer than its window."""
        return True

    @property
    def least_text(self) -> MediaText:
        """Return what the shortest audio becomes."""
        return self._written(max(1, self.num_tokens(1)))

    def num_tokens(self, num_samples: int) -> int:
        """Return the number of embeddings of an audio with this number of samples at `rate_hz`."""
        raise NotImplementedError

    def text_of(self, num_samples: int) -> MediaText:
        """Return what an audio of this length becomes in a prompt. Raises `UnfitImageError` if it is too short for a
        single embedding."""
        if (count := self.num_tokens(num_samples)) < 1:
            raise UnfitImageError(f"an audio of {num_samples} samples at {self.rate_hz} Hz is too short for this model")
        return self._written(count)

    def _written(self, count: int) -> MediaText:
        return MediaText(parts=(count,), token_id=self.token_id, placeholder=self.token_id)
