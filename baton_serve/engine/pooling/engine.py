"""The engine of pooling models: computes whole inputs to vectors, many in one pass; `input_queue.py` chooses which
share a pass.

With several ranks, all of them compute each pass, and rank 0 pools. Its owner calls it from one thread. It has no KV
cache, so block counts in its statistics are 0.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, RequestId
from baton_serve.contracts.pooling import PoolingInput, PoolingSpec
from baton_serve.contracts.vision import READERS
from baton_serve.engine import device
from baton_serve.engine.config import EngineConfig
from baton_serve.engine.core.outputs import BatchSize, EngineStats, FailedRequest, PooledOutput, StepResult
from baton_serve.engine.errors import ConfigError, ModelError, RequestError
from baton_serve.engine.model.loaded_model import LoadProgress
from baton_serve.engine.model.rank_parts import sum_outputs
from baton_serve.engine.model.vision.image_types import NO_PIXELS, ImageReader, Pixels
from baton_serve.engine.model_folder import LOAD_ERRORS, first_line
from baton_serve.engine.parallel.commands import vectors_command
from baton_serve.engine.parallel.ranks import OnLost, Ranks
from baton_serve.engine.parallel.tp_executor import run_on_all_ranks
from baton_serve.engine.pooling.input_queue import PoolingInputQueue, QueuedInput
from baton_serve.engine.pooling.model_kind import ModelKind
from baton_serve.engine.pooling.pooled_forward import PaddedBatch, embedding, padded_batch, pool, scores

logger = logging.getLogger(__name__)

EMA_WEIGHT = 0.1
"""Weight of the newest pass in the moving average of the speed."""


def check_ranks(config: EngineConfig) -> None:
    """Raise `ConfigError` if the settings divide the layers into stages, or the ranks over several hosts."""
    if config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size is {config.pipeline_parallel_size}, but the layers of pooling models are not"
            " divided into stages; the largest number that works is 1: set tensor_parallel_size instead"
        )
    if config.nnodes > 1:
        raise ConfigError(
            f"nnodes is {config.nnodes}, but the ranks of a pooling model must be on one host: set nnodes to 1"
        )


class PoolingEngine:
    """A loaded model that embeds or classifies, with the queue of its inputs. It has those methods of `Engine` that
    instances of all models call.

    `layout` describes a KV block of size 0; only its fingerprint is used, to compare models.
    """

    def __init__(
        self,
        config: EngineConfig,
        kind: ModelKind,
        *,
        progress: LoadProgress | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        """Load a model that computes `kind`, "embed" or "classify", and run the largest forward pass that is allowed,
        to find missing memory. `progress` is called with the phase and its finished fraction, and `on_lost` from
        another thread when the process of another rank has exited; then the engine can only be closed. Raises
        `ConfigError` or `ModelError`."""
        config.check()
        check_ranks(config)
        # The other ranks load at the same time as this one, so they are started first.
        self._ranks = Ranks(config, on_lost, kind=kind)
        try:
            self._load(config, kind, progress or (lambda what, fraction: None))
        except BaseException:
            self._ranks.close()
            raise

    def _load(self, config: EngineConfig, kind: ModelKind, report: LoadProgress) -> None:
        """Load this rank's part of the model, connect the ranks, and run the largest pass."""
        from baton_serve.engine.pooling.loader import (
            load_pooling_model,  # imports transformers, which takes seconds
        )

        self.device = device.select_device(config.device)
        self._model = model = load_pooling_model(config, kind, self.device, report)
        self._ranks.join_pooling_group(self.device)
        sum_outputs(model.module, model.parts, self._ranks.group)
        self.profile = model.profile
        self.vocab_size = model.vocab_size
        self.max_model_len = model.max_model_len
        self.layout = KVLayout(
            fingerprint=model.fingerprint,
            num_layers=0,
            num_kv_heads=0,
            block_tokens=config.block_size or device.defaults(self.device).block_tokens,
            head_dim=0,
            dtype=str(model.dtype).removeprefix("torch."),
        )
        self._max_inputs = config.max_num_seqs
        self._max_tokens = config.max_num_batched_tokens or device.defaults(self.device).max_num_pooled_tokens
        self._waiting = PoolingInputQueue()
        self._num_left: dict[RequestId, int] = {}
        """Number of inputs of each request whose vectors are not computed yet."""
        self._pixels: dict[RequestId, Pixels] = {}
        """Images of the requests that have some, until their last input is computed."""
        self.last_batch = BatchSize()
        """Size of the pass that began last; any thread may read it."""
        self._tokens_per_s = 0.0
        self._num_tokens = self._num_passes = 0
        report("warming up", 0.0)
        # A pass that does not fit into memory should fail at the start, not at the first request.
        self._warm_up()
        report("ready", 1.0)

    @property
    def image_reader(self) -> ImageReader | None:
        """Decodes image files, from any thread; None if this engine reads no images."""
        return None if self._model.images is None else self._model.images.reader

    def pool(
        self,
        request_id: RequestId,
        inputs: list[PoolingInput],
        params: PoolingSpec,
        *,
        priority: int = 0,
        pixels: Pixels = NO_PIXELS,
    ) -> None:
        """Queue the inputs of one request. Later calls of `step` return one result for each input. Lower values of
        `priority` are computed first. `pixels` are the images of all inputs by digest, as `image_reader` returns them.

        Raises `RequestError` if an input or a parameter is not valid.
        """
        if request_id in self._num_left:
            raise RequestError("invalid", f"request id {request_id!r} is already in use")
        self._check(inputs, params, pixels)
        self._waiting.add(request_id, inputs, params, priority)
        self._num_left[request_id] = len(inputs)
        if pixels:
            self._pixels[request_id] = pixels

    def cancel(self, request_id: RequestId) -> None:
        """Drop the inputs of a request that are not computed yet. Unknown and finished requests are ignored."""
        if self._num_left.pop(request_id, None) is not None:
            self._waiting.discard(request_id)
            self._pixels.pop(request_id, None)

    def has_work(self) -> bool:
        """Return whether inputs are queued, so that `step` has something to compute."""
        return len(self._waiting) > 0

    def step(self) -> StepResult:
        """Compute the next queued inputs in one forward pass, and return their results: vectors or scores. If the
        device runs out of memory, their requests fail; with several ranks this raises `EngineError`."""
        started = time.monotonic()
        items = self._waiting.take(max_tokens=self._max_tokens, max_inputs=self._max_inputs)
        result = StepResult()
        if not items:
            return result
        num_tokens = sum(item.length for item in items)
        self.last_batch = BatchSize(len(items), num_tokens)
        try:
            vectors = self._run(items)
        # The pass fails as a whole, and with it all its requests. The engine stays usable.
        except torch.OutOfMemoryError:
            logger.exception("a pass over %d inputs ran out of device memory", len(items))
            self._give_up(items, result)
            return result
        for item, vector in zip(items, vectors, strict=True):
            result.pooled.append(PooledOutput(item.request_id, item.index, list(vector.shape), vector.tobytes()))
            self._count(item)
        self._num_tokens += num_tokens
        self._num_passes += 1
        speed = num_tokens / max(time.monotonic() - started, 1e-9)
        # The first pass sets the average, later ones move it.
        self._tokens_per_s += (speed - self._tokens_per_s) * (EMA_WEIGHT if self._tokens_per_s else 1.0)
        return result

    def cached_block_hashes(self) -> list[BlockHash]:
        """Return an empty list: pooling models have no KV cache."""
        return []

    def stats(self) -> EngineStats:
        """Return the queue's length and the counters. Fields about KV blocks and decoding are 0."""
        return EngineStats(
            free_blocks=0,
            total_blocks=0,
            cached_blocks=0,
            held_blocks=0,
            running=0,
            waiting=len(self._waiting),
            held=0,
            reserved=0,
            queued_tokens=self._waiting.num_tokens,
            prefill_tokens_per_s=self._tokens_per_s,
            decode_step_s=0.0,
            preemptions=0,
            prompt_tokens=self._num_tokens,
            generated_tokens=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            steps=self._num_passes,
        )

    def check_invariants(self) -> None:
        """Assert that the queue's records agree. Only tests call it."""
        self._waiting.check_invariants()

    def close(self) -> None:
        """End the processes of the other ranks. The model's memory is freed when this object is."""
        self._ranks.close()

    def kill_ranks(self) -> None:
        """Kill the processes of the other ranks, if there are any. Any thread may call it."""
        self._ranks.kill()

    @torch.inference_mode()
    def _run(self, items: list[QueuedInput]) -> list["np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]:
        """Compute the inputs. Return a float32 vector for each, or with the task `token_embed` a matrix [num_tokens,
        size]."""
        images = self._model.images
        # Images within texts have unlike sizes, so that each such input has a pass of its own.
        is_apart = items[0].has_images and not (images is not None and images.has_own_length(items[0].input))
        passes = [[item] for item in items] if is_apart else [items]
        return [vector for one in passes for vector in self._run_pass(one)]

    def _run_pass(self, items: list[QueuedInput]) -> list["np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]:
        """Compute the inputs in one forward pass, and return what `_run` does."""
        batch, output = self._forward(items)
        vectors: list[Tensor] = [output] * len(items)
        # Inputs of requests with equal parameters are pooled together.
        for params in dict.fromkeys(item.params for item in items):
            rows = [row for row, item in enumerate(items) if item.params == params]
            for row, vector in zip(rows, self._heads(output, batch, rows, params), strict=True):
                # without padding
                vectors[row] = vector[: items[row].length] if params.task == "token_embed" else vector
        return [vector.cpu().numpy() for vector in vectors]

    def _heads(self, output: Tensor, batch: PaddedBatch, rows: list[int], params: PoolingSpec) -> Tensor:
        """Turn the model's output for the inputs in `rows` of the batch, which have equal parameters, into results:
        pooling, linear layers and normalization for embeddings, the activation for scores."""
        model = self._model
        chosen = output if len(rows) == len(output) else output[rows]
        if model.recipe is None:
            return scores(chosen, params, model.activation)
        # token_embed keeps one vector per token, so it is not pooled.
        if params.task == "embed":
            lengths = batch.lengths if len(rows) == len(output) else batch.lengths[rows]
            chosen = pool(chosen, lengths, model.recipe.pooling)
        vectors = chosen.float()
        for layer in model.dense:
            vectors = layer(vectors)
        return embedding(vectors, params, normalize=model.recipe.normalize)

    def _forward(self, items: list[QueuedInput]) -> tuple[PaddedBatch, Tensor]:
        """Pad the inputs on the right to the length of the longest one, and compute them on all ranks. Return the
        batch with the output of the model."""
        has_types = self._model.has_token_types and any(item.input.token_type_ids for item in items)
        ids, lengths, types = padded_arrays(items, self._model.pad_id, has_types=has_types)
        images: dict[str, Tensor] = {}
        if self._model.images is not None and items[0].has_images:
            pixels = [self._pixels[item.request_id] for item in items]
            images = self._model.images.arguments([item.input for item in items], pixels)
        if self._ranks.num_ranks == 1:
            return self._computed(ids, lengths, types, images)
        self._ranks.send_command(vectors_command(ids, lengths, types, images))
        with run_on_all_ranks():
            return self._computed(ids, lengths, types, images)

    def _computed(
        self,
        ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        types: NDArray[np.int64] | None,
        images: Mapping[str, Tensor],
    ) -> tuple[PaddedBatch, Tensor]:
        """Compute a padded batch with the tensors `images`, which lie in host memory. Each rank encodes the images by
        itself: it would have to wait for them anyway."""
        sent = {name: device.send(value, self.device) for name, value in images.items()}
        for value in sent.values():
            self._ranks.group.broadcast(value)
        batch = replace(padded_batch(ids, lengths, types, self.device), images=sent)
        return batch, self._model.network(batch)

    def _check(self, inputs: list[PoolingInput], params: PoolingSpec, pixels: Pixels) -> None:
        """Check that this model can compute these inputs with these parameters. Raises `RequestError` if not."""
        if params.task not in self.profile.tasks:
            raise RequestError("invalid", f"this model does not serve {params.task}; it serves {self.profile.tasks}")
        if params.dimensions is not None and not 1 <= params.dimensions <= self.profile.dimensions:
            raise RequestError("invalid", f"dimensions must lie in 1..{self.profile.dimensions}")
        recipe = self._model.recipe
        if params.normalize is False and recipe is not None and recipe.is_always_normalized:
            raise RequestError("invalid", "normalize: this model normalizes its vectors itself; leave it out")
        for given in inputs:
            self._check_input(given, pixels)
        if not inputs:
            raise RequestError("invalid", "there is no input")

    def _check_input(self, given: PoolingInput, pixels: Pixels) -> None:
        """Check the tokens and images of one input. Raises `RequestError` if the model cannot compute it."""
        images, length = self._model.images, len(given.token_ids)
        if given.media and images is None:
            raise RequestError("invalid", f"this instance reads no images in inputs: {READERS}")
        has_own_length = images is not None and images.has_own_length(given)
        if not 0 < length <= self.max_model_len and not has_own_length:
            raise RequestError(
                "too_long" if length else "invalid",
                f"an input has {length} tokens; the model takes 1..{self.max_model_len}",
            )
        if max(given.token_ids) >= self.vocab_size or min(given.token_ids) < 0:
            raise RequestError("invalid", f"token ids must lie in 0..{self.vocab_size - 1}")
        types = given.token_type_ids
        if types is not None and (len(types) != length or set(types) - {0, 1}):
            raise RequestError("invalid", "token_type_ids must be 0 or 1, one for each token")
        if images is not None:
            images.check(given, pixels)

    def _count(self, item: QueuedInput) -> None:
        """Count an input as computed. A request whose last input was counted is forgotten."""
        self._num_left[item.request_id] -= 1
        if not self._num_left[item.request_id]:
            del self._num_left[item.request_id]
            self._pixels.pop(item.request_id, None)

    def _give_up(self, items: list[QueuedInput], result: StepResult) -> None:
        """Fail the requests of these inputs, because the device had too little memory for their pass; other requests go
        on."""
        message = "the device ran out of memory in a pass; lower max_num_batched_tokens or max_model_len"
        for request_id in {item.request_id for item in items}:
            self.cancel(request_id)
            result.failed.append(FailedRequest(request_id, message))

    def _warm_up(self) -> None:
        """Run the longest single input and the largest batch, to compile kernels, to measure the speed, and to find
        missing memory. On the CPU the inputs are short.

        Raises `ConfigError` if the memory is too small, and `ModelError` if the model computes NaN.
        """
        limit = self._max_tokens if not device.is_host(self.device) else min(self._max_tokens, 256)
        longest = self.max_model_len if not device.is_host(self.device) else min(self.max_model_len, 64)
        params = PoolingSpec(task=self.profile.tasks[0])
        # The longest single input, and many short ones, need most memory in different parts of the model.
        passes = [[longest], [min(longest, 64)] * max(1, min(self._max_inputs, limit // min(longest, 64)))]
        try:
            for lengths in passes:
                items = [
                    QueuedInput(RequestId("warm-up"), row, PoolingInput([0] * length), params, 0, row)
                    for row, length in enumerate(lengths)
                ]
                if any(np.isnan(vector).any() for vector in self._run(items)):
                    raise ModelError("the model computed NaN: its weights are broken, or its dtype is too small")
                started = time.perf_counter()
                self._run(items)
                self._tokens_per_s = sum(lengths) / max(time.perf_counter() - started, 1e-9)
            self._try_image(params)
        except torch.OutOfMemoryError as exc:
            raise ConfigError(
                f"a pass over {self._max_tokens} tokens, or one input of {longest}, does not fit the device's memory;"
                " lower max_num_batched_tokens or max_model_len"
            ) from exc

    def _try_image(self, params: PoolingSpec) -> None:
        """Compute an input with an image, if the model reads images. Raises `ModelError` if that fails."""
        if (images := self._model.images) is None:
            return
        request_id = RequestId("warm-up")
        try:
            given, self._pixels[request_id] = images.trial()
            (vector,) = self._run([QueuedInput(request_id, 0, given, params, 0, 0)])
        except LOAD_ERRORS as exc:
            raise ModelError(f"the image processor does not fit the model: {first_line(exc)}") from exc
        del self._pixels[request_id]
        if np.isnan(vector).any():
            raise ModelError("the model computed NaN of an image: its weights are broken, or its dtype is too small")


def padded_arrays(
    items: Sequence[QueuedInput], pad_id: int, *, has_types: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | None]:
    """Pad inputs on the right to the length of the longest one. Return their tokens [num_inputs, longest], their
    numbers of tokens, and with `has_types` their token types [num_inputs, longest], zeros where an input has none;
    otherwise None, which encoders take as zeros.
    """
    longest = max(item.length for item in items)
    ids = np.full((len(items), longest), pad_id, dtype=np.int64)
    types = np.zeros_like(ids) if has_types else None
    for row, item in enumerate(items):
        ids[row, : item.length] = item.input.token_ids
        if types is not None and item.input.token_type_ids:
            types[row, : item.length] = item.input.token_type_ids
    return ids, np.array([item.length for item in items], dtype=np.int64), types
