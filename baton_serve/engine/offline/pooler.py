"""Inputs to vectors: adds them all to an engine and steps it until the last has come."""

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
    def __init__(self, engine: PoolingEngine, tokenizer: Any) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._num_requests = 0

    def inputs(self, prompts: Sequence[ParsedPrompt], truncate: int | None) -> list[pooling.PoolingInput]:
        """Cut on the right to `truncate` tokens, special tokens kept; -1 cuts to what the model takes."""
        texts = [prompt.text for prompt in prompts if prompt.text is not None]
        read = iter(self._tokenized(texts, None, truncate))
        limit = self._limit(truncate)
        return [
            next(read) if prompt.token_ids is None else pooling.PoolingInput(prompt.token_ids[:limit])
            for prompt in prompts
        ]

    def pairs(self, first: Sequence[str], second: Sequence[str], truncate: int | None) -> list[pooling.PoolingInput]:
        """Framed as the tokenizer frames pairs; the longer text is cut first."""
        return self._tokenized(first, second, truncate)

    def read(
        self,
        inputs: Sequence[pooling.PoolingInput],
        task: pooling.PoolingTask,
        params: PoolingParams,
        bar: PromptProgressBar,
    ) -> list[Tensor]:
        """Each float32, in the order of the inputs. Raises `RequestError`."""
        if not inputs:
            return []
        engine = self.engine
        request_id = RequestId(str(self._num_requests))
        self._num_requests += 1
        asked = pooling.PoolingParams(
            task=task, dimensions=params.dimensions, normalize=params.normalize, activation=params.activation
        )
        if params.dimensions is not None and not engine.profile.is_matryoshka:
            raise ConfigError('dimensions: the model\'s config.json does not say "is_matryoshka": true')
        engine.pool(request_id, list(inputs), asked)
        found: dict[int, Tensor] = {}
        try:
            while len(found) < len(inputs):
                result = engine.step()
                for failed in result.failed:
                    raise EngineError(failed.message)
                for output in result.pooled:
                    found[output.index] = torch.from_numpy(np.frombuffer(output.data, dtype="<f4").copy()).reshape(
                        output.shape
                    )
                    bar.done(len(inputs[output.index].token_ids))
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
            pooling.PoolingInput(ids, kinds if kinds is not None and any(kinds) else None)
            for ids, kinds in zip(encoded["input_ids"], types, strict=True)
        ]

    def _limit(self, truncate: int | None) -> int | None:
        if truncate is None:
            return None
        longest = self.engine.max_model_len
        if truncate == 0 or truncate > longest:
            raise ConfigError(f"truncate_prompt_tokens is {truncate}; the model takes 1..{longest} tokens, -1 for all")
        return longest if truncate == -1 else truncate
