"""Computes vectors of the offline API: tokenizes, truncates, and steps a `PoolingEngine` until the last input is
computed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton_serve.contracts import pooling
from baton_serve.contracts.identity import RequestId
from baton_serve.contracts.model_path import model_folder
from baton_serve.contracts.vision import READERS, TEXT_ALONE, EmbedderImages, embedder_images
from baton_serve.contracts.vision.model_files import ModelFacts
from baton_serve.engine.errors import ConfigError, EngineError
from baton_serve.engine.model.vision.image_types import DecodedImage, EncodedImage
from baton_serve.engine.offline.engine_args import OpenedModel
from baton_serve.engine.offline.progress import PromptProgressBar
from baton_serve.engine.offline.prompts import ParsedPrompt
from baton_serve.engine.offline.request_params import PoolingParams
from baton_serve.engine.pooling.engine import PoolingEngine


class OfflinePooler:
    """Tokenizes texts and computes their embeddings or scores with a pooling engine. Its owner closes the engine."""

    def __init__(self, engine: PoolingEngine, opened: OpenedModel) -> None:
        """`opened` is the model that `engine` has loaded."""
        self.engine = engine
        self._tokenizer = opened.tokenizer
        self._media = opened.media
        self._embedder: EmbedderImages | None = embedder_images(ModelFacts.of(model_folder(opened.config.model)))
        self._pixels: dict[bytes, DecodedImage | EncodedImage] = {}
        """Images of the inputs that were made last, by digest."""
        self._num_requests = 0

    def inputs(self, prompts: Sequence[ParsedPrompt], truncate: int | None) -> list[pooling.PoolingInput]:
        """Return prompts as tokenized inputs. `truncate` is the number of tokens to which each is cut on the right,
        with special tokens kept; -1: the longest input of the model; None: not cut."""
        self._pixels.clear()
        texts = [prompt.text for prompt in prompts if prompt.text is not None and not prompt.media]
        texts = texts if self._embedder is None else list(map(self._embedder.written, texts))
        read = iter(self._tokenized(texts, None, truncate))
        limit = self._limit(truncate)
        found: list[pooling.PoolingInput] = []
        for prompt in prompts:
            if prompt.media:
                found.append(self._with_images(prompt, truncate))
            else:
                is_text = prompt.token_ids is None
                found.append(next(read) if is_text else pooling.PoolingInput((prompt.token_ids or [])[:limit]))
        return found

    def _with_images(self, prompt: ParsedPrompt, truncate: int | None) -> pooling.PoolingInput:
        """Return a prompt with images as an input, and keep their pixels for `pool`. Raises `ConfigError` or
        `RequestError` if the model does not accept it."""
        from baton_serve.engine.offline.images import MediaRules, add_images  # loads Pillow

        embedder, reader = self._embedder, self.engine.image_reader
        if embedder is None or reader is None:
            raise ConfigError(f"this model does not accept images in inputs: {READERS}")
        if truncate is not None:
            raise ConfigError("truncate_prompt_tokens could cut an image: leave it out for prompts with images")
        is_alone, family = embedder.is_alone, embedder.family
        if is_alone and ((prompt.text or "").strip() or prompt.token_ids):
            raise ConfigError(TEXT_ALONE)
        if is_alone and embedder.image_text is None:
            # Nothing is written beside the image, which any token may count.
            prompt = prompt._replace(text=None, token_ids=[family.image_token_id] * len(prompt.media))
        elif is_alone:
            prompt = prompt._replace(text=(embedder.image_text or "") * len(prompt.media), token_ids=None)
        ids = prompt.token_ids
        if ids is None:
            ids = self._tokenizer(prompt.text, add_special_tokens=not is_alone)["input_ids"]
        rules = MediaRules(family, *self._media)
        found = add_images(prompt, ids, rules, reader, self._tokenizer, add_special_tokens=not is_alone)
        self._pixels |= found.pixels
        return pooling.PoolingInput(found.token_ids, media=found.media)

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
        engine.pool(request_id, list(inputs), asked, pixels=dict(self._pixels))
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
            add_special_tokens=self._embedder is None or not self._embedder.writes_special_tokens,
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
