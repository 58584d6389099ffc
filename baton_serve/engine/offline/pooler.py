"""Runs inputs of the offline API through a `PoolingEngine`: adds all and steps it until the last is computed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton_serve.contracts import pooling
from baton_serve.contracts.identity import RequestId
from baton_serve.engine.errors import ConfigError, EngineError
from baton_serve.engine.offline.params import PoolingParams
from baton_serve.engine.offline.progress import PromptProgressBar
from baton_serve.engine.offline.prompts import ParsedPrompt
from baton_serve.engine.pooling.engine import PoolingEngine


class OfflinePooler:
    """Tokenizes texts and computes their embeddings or scores with a pooling engine. Its owner closes the engine."""

    def __init__(self, engine: PoolingEngine, tokenizer: Any) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._num_requests = 0

    def inputs(self, prompts: Sequence[ParsedPrompt], truncate: int | None) -> list[pooling.PoolingInput]:
        """Return prompts as tokenized inputs. `truncate` is the number of tokens to which each is cut on the right,
        with special tokens kept; -1: the longest input of the model; None: not cut."""
        texts = [prompt.text for prompt in prompts if prompt.text is not None]
        read = iter(self._tokenized(texts, None, truncate))
        limit = self._limit(truncate)
        return [
            next(read) if prompt.token_ids is None else pooling.PoolingInput(prompt.token_ids[:limit])
            for prompt in prompts
        ]

    def pairs(self, first: Sequence[str], second: Sequence[str], truncate: int | None) -> list[pooling.PoolingInput]:
        """Return the pairs `first[i]`, `second[i]` as tokenized inputs, as the model's tokenizer joins two texts.
        `truncate` is as in `inputs`; the longer text of a pair is cut first."""
        return self._tokenized(first, second, truncate)

    def pool(
        self,
        inputs: Sequence[pooling.PoolingInput],
        task: pooling.PoolingTask,
        params: PoolingParams,
        bar: PromptProgressBar,
    ) -> list[Tensor]:
        """Compute the results of these inputs, in their order: float32 tensors, a vector or a matrix with one row per
        token each. `bar` counts the computed inputs.

        Raises `RequestError` if the model does not support the task or an input, and `EngineError` if computing failed.
        """
        if not inputs:
            return []
        engine = self.engine
        request_id = RequestId(str(self._num_requests))
        self._num_requests += 1
        asked = pooling.PoolingSpec(
            task=task, dimensions=params.dimensions, normalize=params.normalize, activation=params.activation
        )
        # Only models that were trained for it give useful vectors when they are shortened.
        if params.dimensions is not None and not engine.profile.is_matryoshka:
            raise ConfigError('dimensions needs a Matryoshka model: its config.json has no "is_matryoshka": true')
        engine.pool(request_id, list(inputs), asked)
        found: dict[int, Tensor] = {}
        try:
            while len(found) < len(inputs):
                result = engine.step()
                for failed in result.failed:
                    raise EngineError(failed.message)
                for output in result.pooled:
                    # A copy, because `frombuffer` returns read-only memory, which torch warns about.
                    found[output.index] = torch.from_numpy(np.frombuffer(output.data, dtype="<f4").copy()).reshape(
                        output.shape
                    )
                    bar.done(len(inputs[output.index].token_ids))
        # After an error, inputs of this call may still be queued; an ended request is ignored.
        finally:
            engine.cancel(request_id)
        return [found[index] for index in range(len(inputs))]

    def _tokenized(
        self, first: Sequence[str], second: Sequence[str] | None, truncate: int | None
    ) -> list[pooling.PoolingInput]:
        if not first:
            return []
        limit = self._limit(truncate)
        encoded = self._tokenizer(
            list(first),
            list(second) if second is not None else None,
            truncation="longest_first" if limit is not None else False,
            max_length=limit,
            return_token_type_ids=True,
            return_attention_mask=False,
        )
        types = encoded.get("token_type_ids") or [None] * len(first)
        return [
            # Models without segments return zeros, or no token types at all. None saves the message's bytes.
            pooling.PoolingInput(ids, kinds if kinds is not None and any(kinds) else None)
            for ids, kinds in zip(encoded["input_ids"], types, strict=True)
        ]

    def _limit(self, truncate: int | None) -> int | None:
        """Return the number of tokens to which inputs are cut, or None for no cut. `truncate` -1 stands for the longest
        input of the model. Raises `ConfigError` if it is 0 or more than that."""
        if truncate is None:
            return None
        longest = self.engine.max_model_len
        if truncate == 0 or truncate > longest:
            raise ConfigError(f"truncate_prompt_tokens is {truncate}; it must be 1 to {longest}, or -1 for {longest}")
        return longest if truncate == -1 else truncate
