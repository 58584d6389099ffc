"""Applies repetition, presence and frequency penalties to logits, by token counts that are kept on the device.

They are defined as in vLLM: repetition considers prompt and output, the other two only the output.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from baton_serve.engine.core.sequence import Sequence


@dataclass(slots=True)
class _Counts:
    """Which tokens the prompt of one sequence has, and how often each token was generated, as tensors on the device."""

    prompt: Tensor  # bool [vocab_size]
    output: Tensor  # float32 [vocab_size]
    num_seen: int


class Penalties:
    """Applies repetition, presence and frequency penalties to scores. It counts the tokens of each sequence on the
    device, and forgets the counts when the sequence ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: WeakKeyDictionary[Sequence, _Counts] = WeakKeyDictionary()

    def apply(self, scores: Tensor, sequences: Rows[Sequence]) -> Tensor:
        """Return `scores` [rows, vocab_size] with penalties applied, as a new tensor. `sequences[i]` is the sequence of
        row `i`."""
        counts = [self._updated(sequence, scores.shape[1]) for sequence in sequences]
        output = torch.stack([c.output for c in counts])
        seen = torch.stack([c.prompt for c in counts]) | (output > 0)
        params = [sequence.request.work.sampling for sequence in sequences]
        repetition = self._column([p.repetition_penalty for p in params])
        # Dividing a negative score would make it more likely, so negative ones are multiplied (as in vLLM).
        scores = torch.where(seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
        scores = scores - self._column([p.frequency_penalty for p in params]) * output
        return scores - self._column([p.presence_penalty for p in params]) * (output > 0)

    def _updated(self, sequence: Sequence, vocab_size: int) -> _Counts:
        """Return the token counts of a sequence, after adding the tokens that it got since the last call."""
        num_prompt = sequence.request.work.num_prompt_tokens
        counts = self._counts.get(sequence)
        if counts is None:
            prompt = torch.zeros(vocab_size, dtype=torch.bool, device=self._device)
            prompt[self._upload(sequence.token_ids[:num_prompt])] = True
            counts = _Counts(prompt, torch.zeros(vocab_size, device=self._device), num_prompt)
            self._counts[sequence] = counts
        new = sequence.token_ids[counts.num_seen :]
        if new:
            tokens = self._upload(new)
            counts.output.index_add_(0, tokens, torch.ones(len(new), device=self._device))
            counts.num_seen = len(sequence.token_ids)
        return counts

    def _column(self, values: list[float]) -> Tensor:
        return self._upload(values)[:, None]

    def _upload(self, values: list[float] | list[int]) -> Tensor:
        """Return these values as a tensor on the device, without waiting for the copy."""
        return torch.tensor(values).to(self._device, non_blocking=True)
