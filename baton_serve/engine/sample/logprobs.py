"""Log-probabilities as clients see them: of the raw logits, before any penalty, with the token's rank."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from baton_serve.contracts.messages import Logprob, TokenLogprobs


def row_logprobs(raw: Tensor, chosen: Sequence[int], wanted: Mapping[int, int]) -> list[TokenLogprobs | None]:
    """raw [rows, vocab_size]. `wanted` gives, per row that wants any, how many alternatives."""
    picked = torch.tensor(list(wanted), device=raw.device)
    answers = token_logprobs(raw[picked], [chosen[i] for i in wanted], max(wanted.values()))
    result: list[TokenLogprobs | None] = [None] * len(chosen)
    for (row, count), answer in zip(wanted.items(), answers, strict=True):
        result[row] = TokenLogprobs(answer.chosen, answer.top[:count])
    return result


def token_logprobs(raw: Tensor, chosen: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """One per row. A rank is the number of tokens that are at least as likely."""
    logprobs = raw.float().log_softmax(dim=-1)
    tokens = torch.tensor(chosen, device=raw.device)[:, None]
    own = logprobs.gather(1, tokens)
    ranks = (logprobs >= own).sum(dim=-1).tolist()
    values, ids = logprobs.topk(min(num_top, raw.shape[1]), dim=-1)
    top_values, top_ids, own_values = values.tolist(), ids.tolist(), own[:, 0].tolist()
    return [
        TokenLogprobs(
            Logprob(token, own_values[row], ranks[row]),
            [
                Logprob(token_id, value, rank)
                for rank, (token_id, value) in enumerate(zip(top_ids[row], top_values[row], strict=True), 1)
            ],
        )
        for row, token in enumerate(chosen)
    ]
