"""Samples tokens from logits: logits processors, `logit_bias`, temperature, min-p, top-k, top-p; computes the answer's
logprobs.

The order is vLLM's: logits processors, token masks, logit_bias, penalties, temperature, min_p, top_k, top_p. Then the
token is found by inverting the cumulative probability, in vocabulary order, at the token's own random number. So the
result does not depend on the other rows.
"""

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from baton_serve.contracts.messages import TokenLogprob, TokenLogprobs
from baton_serve.engine import device as devices
from baton_serve.engine.core.sampling_rules import GREEDY_BELOW, has_penalties, is_plain_greedy, uniform
from baton_serve.engine.core.scheduler import ModelRunnerOutput, RowFailure, SampleRow
from baton_serve.engine.sample.penalties import Penalties
from baton_serve.engine.sample.token_masks import TokenMasks
from baton_serve.engine.sample.transcripts import prefer_timestamps


def row_logprobs(
    raw: Tensor, chosen: Sequence[int], wanted: Mapping[int, int], named: Mapping[int, Sequence[int]] | None = None
) -> list[TokenLogprobs | None]:
    """Return the logprobs of each row of `raw` [rows, vocab_size], or None for rows that did not ask for them. `chosen`
    are the sampled tokens, by row.

    `wanted` maps the row numbers that asked for logprobs to the number of alternatives. `named` maps row numbers to the
    token ids whose logprobs were asked for instead of the most likely ones.
    """
    picked = torch.tensor(list(wanted), device=raw.device)
    answers = token_logprobs(raw[picked], [chosen[i] for i in wanted], max(wanted.values()))
    result: list[TokenLogprobs | None] = [None] * len(chosen)
    for (row, count), answer in zip(wanted.items(), answers, strict=True):
        token_ids = (named or {}).get(row)
        top = answer.top[:count] if token_ids is None else named_logprobs(raw[row], token_ids)
        result[row] = TokenLogprobs(answer.chosen, top)
    return result


def named_logprobs(raw: Tensor, token_ids: Sequence[int]) -> list[TokenLogprob]:
    """Return the logprobs and ranks of these tokens, in their order. `raw` are the logits of one row, [vocab_size]."""
    logprobs = raw.float().log_softmax(dim=-1)
    own = logprobs[torch.tensor(token_ids, device=raw.device)]
    # One by one: all at once would need `len(token_ids)` times the memory of the vocabulary.
    ranks = [int((logprobs >= value).sum()) for value in own]
    return [TokenLogprob(*found) for found in zip(token_ids, own.tolist(), ranks, strict=True)]


def token_logprobs(raw: Tensor, chosen: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return, for each row of logits `raw` [rows, vocab_size], the logprobs of the token in `chosen` and of the
    `num_top` most likely tokens.

    The rank of the chosen token is the number of tokens that are at least as likely.
    """
    logprobs = raw.float().log_softmax(dim=-1)
    tokens = torch.tensor(chosen, device=raw.device)[:, None]
    own = logprobs.gather(1, tokens)
    ranks = (logprobs >= own).sum(dim=-1).tolist()
    values, ids = logprobs.topk(min(num_top, raw.shape[1]), dim=-1)
    top_values, top_ids, own_values = values.tolist(), ids.tolist(), own[:, 0].tolist()
    return [
        TokenLogprobs(
            TokenLogprob(token, own_values[row], ranks[row]),
            [
                TokenLogprob(token_id, value, rank)
                for rank, (token_id, value) in enumerate(zip(top_ids[row], top_values[row], strict=True), 1)
            ],
        )
        for row, token in enumerate(chosen)
    ]


logger = logging.getLogger(__name__)

MAX_CANDIDATES = 1024
"""Number of largest logits that top_k and top_p look at first.

Sorting the whole vocabulary is slow, and these nearly always contain all tokens that are kept.
"""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The sampled tokens of one step, still on the device, and the logprobs if any row asked for them."""

    tokens: Tensor  # int64 [num_rows], on the device
    logprobs: list[TokenLogprobs | None] | None = None
    failed: dict[int, RowFailure] = field(default_factory=dict)
    """By row number: the error of a logits processor."""


class Sampler:
    """Samples the tokens of each step on one device. Between steps it keeps the token counts that penalties need."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._penalties = Penalties(device)

    def sample(self, logits: Tensor, rows: Rows[SampleRow], *, masks: TokenMasks | None = None) -> ModelRunnerOutput:
        """Sample one token for each row, wait for the tokens and return them. The arguments are those of `choose`."""
        choice = self.choose(logits, rows, masks=masks)
        return ModelRunnerOutput(choice.tokens.tolist(), choice.logprobs, failed=choice.failed)

    def choose(self, logits: Tensor, rows: Rows[SampleRow], *, masks: TokenMasks | None = None) -> SamplerOutput:
        """Sample one token for each row of `logits` [num_rows, vocab_size], of any floating dtype, and leave the tokens
        on the device. `rows` names the sequence of each row; `masks` has the allowed tokens, None: all.

        This waits for the device only if a row asks for logprobs, or if top_k or top_p need the whole vocabulary. A row
        with NaN gets the token vocab_size.
        """
        params = [row.sequence.request.work.sampling for row in rows]
        if masks is None and all_plain_greedy(rows):
            return SamplerOutput(_largest(logits))
        raw = logits.float()
        scores = raw.clone()
        failed = process_logits(scores, rows)
        self._adjust(scores, rows, masks)
        random = [i for i, p in enumerate(params) if p.temperature >= GREEDY_BELOW]
        tokens = _largest(scores)
        # Random rows are computed only where a row needs them. NaN rows keep vocab_size from both ways of sampling.
        if random:
            picked = self._upload(random)
            tokens[picked] = self._draw(scores[picked], [rows[i] for i in random])
        wanted = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        if not wanted:
            return SamplerOutput(tokens, failed=failed)
        named = {i: params[i].logprob_token_ids for i in wanted if params[i].logprob_token_ids}
        # Logprobs are of the raw logits, as in vLLM. NaN rows need a valid index here; they fail anyway.
        logprobs = row_logprobs(raw, tokens.clamp(max=raw.shape[1] - 1).tolist(), wanted, named)
        return SamplerOutput(tokens, logprobs, failed)

    def _adjust(self, scores: Tensor, rows: Rows[SampleRow], masks: TokenMasks | None) -> None:
        """Change `scores` in place as the requests of the rows want it: set tokens that `masks` forbids to -inf (None:
        no token), and apply `logit_bias` and penalties."""
        if masks is not None:
            masks.apply(scores)
            prefer_timestamps(scores, rows)
        biased = [
            (i, token, bias)
            for i, row in enumerate(rows)
            for token, bias in row.sequence.request.work.sampling.logit_bias.items()
        ]
        if biased:
            row_index = self._upload([b[0] for b in biased])
            token_index = self._upload([b[1] for b in biased])
            scores[row_index, token_index] += self._upload([b[2] for b in biased])
        penalised = [i for i, r in enumerate(rows) if has_penalties(r.sequence.request.work.sampling)]
        if penalised:
            picked = self._upload(penalised)
            scores[picked] = self._penalties.apply(scores[picked], [rows[i].sequence for i in penalised])

    def _draw(self, scores: Tensor, rows: Rows[SampleRow]) -> Tensor:
        """Sample one token at random for each row of `scores` [rows, vocab_size], with the row's temperature, min_p,
        top_k and top_p. Return the tokens, int64 [rows]."""
        params = [row.sequence.request.work.sampling for row in rows]
        scores = scores / self._column([p.temperature for p in params])
        if any(p.min_p > 0.0 for p in params):  # p / p_max >= min_p needs no softmax: subtract logarithms instead
            floor = scores.amax(dim=-1, keepdim=True) + self._column([p.min_p for p in params]).log()
            scores = scores.masked_fill(scores < floor, float("-inf"))
        vocab_size = scores.shape[1]
        cut = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocab_size]
        if cut:
            picked = self._upload(cut)
            top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in (params[i] for i in cut)]
            top_p = [params[i].top_p for i in cut]
            scores[picked] = apply_top_k_top_p(
                scores[picked],
                self._upload(top_k)[:, None],
                self._column(top_p),
            )
        # Seed, sequence and position determine the random number, so a replay on another instance draws the same token.
        points = [uniform(p.seed, row.index, row.sequence.num_generated) for p, row in zip(params, rows, strict=True)]
        return invert_cumulative(scores, self._upload(points, dtype=torch.float64))

    def _column(self, values: list[float]) -> Tensor:
        return self._upload(values, dtype=torch.float32)[:, None]

    def _upload(self, values: object, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return these values as a tensor of this dtype on the device, without waiting for the copy."""
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)


def process_logits(scores: Tensor, rows: Rows[SampleRow]) -> dict[int, RowFailure]:
    """Apply the logits processors of each row's request to its row of `scores`, float32 [rows, vocab_size], in place.

    Return the failures by row number: an error of a processor fails only the request that it belongs to.
    """
    failed: dict[int, RowFailure] = {}
    for number, row in enumerate(rows):
        request = row.sequence.request
        if not request.logits_processors:
            continue
        num_prompt = request.work.num_prompt_tokens
        tokens = row.sequence.token_ids
        # Copies: a processor may keep or change its arguments.
        prompt, generated, own = tokens[:num_prompt], tokens[num_prompt:], scores[number].clone()
        try:
            for process in request.logits_processors:
                own = process(prompt, generated, own)
            scores[number] = own
        except Exception as exc:
            logger.exception("a logits processor of request %s failed", request.work.request_id)
            failed[number] = RowFailure(f"a logits processor failed: {type(exc).__name__}: {exc}", "invalid")
    return failed


def all_plain_greedy(rows: Rows[SampleRow]) -> bool:
    """Return whether argmax gives the right token for every row: temperature 0, no penalties, no `logit_bias`, no
    logprobs, no logits processors.

    Masks are not checked: the caller must have none.
    """
    requests = [row.sequence.request for row in rows]
    return all(is_plain_greedy(request.work.sampling) and not request.logits_processors for request in requests)


def apply_top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor, *, num_candidates: int = MAX_CANDIDATES) -> Tensor:
    """Return `scores` in which all tokens but each row's `top_k` most likely ones are -inf, and of these only the
    fewest are kept whose probabilities together reach `top_p`.

    `scores` is [rows, vocab_size]; `top_k` (vocab_size: no limit) and `top_p` are [rows, 1]. Probabilities are relative
    to the tokens that top_k keeps, as in vLLM. To be fast, only the `num_candidates` largest scores of a row are
    sorted, unless these are too few.
    """
    vocab_size = scores.shape[1]
    width = min(num_candidates, vocab_size)
    values, tokens = scores.topk(width, dim=-1)
    in_top_k = torch.arange(width, device=scores.device) < top_k
    among_all = scores.logsumexp(dim=-1, keepdim=True)
    among_top_k = values.masked_fill(~in_top_k, float("-inf")).logsumexp(dim=-1, keepdim=True)
    probabilities = (values - torch.where(top_k < vocab_size, among_top_k, among_all)).exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    # With top_p = 1, rounding errors of the sum must not remove a token.
    kept = in_top_k & ((before < top_p) | (top_p >= 1.0))
    kept[:, 0] = True  # the most likely token is always kept
    result = torch.full_like(scores, float("-inf"))
    result.scatter_(1, tokens, values.masked_fill(~kept, float("-inf")))
    if width < vocab_size:
        # If the last candidate is still kept, tokens beyond the candidates may belong to the result too. Compute these
        # few rows again with the whole vocabulary. `nonzero` waits for the device.
        is_sum_known = (top_k <= width) | (top_k >= vocab_size)
        unsure = ((top_k > width) & (kept[:, -1:] | ~is_sum_known))[:, 0].nonzero()[:, 0]
        if unsure.numel():
            result[unsure] = apply_top_k_top_p(scores[unsure], top_k[unsure], top_p[unsure], num_candidates=vocab_size)
    return result


def _largest(scores: Tensor) -> Tensor:
    """Return the token with the largest score of each row of `scores` [rows, vocab_size]; vocab_size for a row with
    NaN."""
    if devices.is_host(scores.device):
        # numpy takes a fifth of torch's time there. Both return the first of equal scores, and NaN as the largest one.
        wide = scores.float().numpy()
        tokens = wide.argmax(axis=1)
        tokens[np.isnan(wide[np.arange(len(wide)), tokens])] = scores.shape[1]
        return torch.from_numpy(tokens)
    found = scores.max(dim=-1)
    return found.indices.masked_fill_(found.values.isnan(), scores.shape[1])


def invert_cumulative(scores: Tensor, points: Tensor) -> Tensor:
    """Return for each row the first token, in the order of the vocabulary, at which the sum of the probabilities so far
    exceeds the row's number in `points`. This samples the distribution if the numbers are random.

    `scores` are logits [rows, vocab_size]; `points` [rows] are in [0, 1). A row with NaN has no such token: its result
    is vocab_size.
    """
    # float64: in float32 the sum over a large vocabulary loses the small probabilities at its end.
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    # Scale the points by the rounded total instead of dividing by it, so that a point below 1 always finds a token.
    targets = points[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]
