"""Starts the attempts of one request, also replays from the tokens generated so far: places them and sends them to
instances.
"""

from collections.abc import Callable, Sequence

import msgspec

from baton_serve.contracts.block_hash import checkpoint_hash
from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, InstanceId, RequestId
from baton_serve.contracts.messages import ErrorCode, Work
from baton_serve.contracts.wire import WireError
from baton_serve.services.router.cluster.cluster import Cluster
from baton_serve.services.router.cluster.worker_state import WorkerState
from baton_serve.services.router.placement.encode_workers import SentImages, images_to_send
from baton_serve.services.router.placement.policy import Candidate, Demand, NoCapacity, Placement, place
from baton_serve.services.router.protocol.errors import BadRequestError
from baton_serve.services.router.requests.attempt import (
    Attempt,
    AttemptOwner,
    ImageEncoding,
    image_encodings,
    sequence_indexes,
)
from baton_serve.services.router.requests.prompt_request import (
    PromptBlockHashes,
    PromptRequest,
    RequestPolicy,
    RequestTiming,
)
from baton_serve.services.router.text.token_sequence import TokenSequence

ALL_IMAGES_S = 60.0
"""Time for which an instance gets all images, in seconds, after it had to be sent one whose KV it had reported as
cached."""


class RequestAttempts:
    """The running attempts of one request, and the instances to avoid or to prefer because of earlier attempts that
    failed.

    A `RequestLifecycle` owns it. It keeps no reference to its owner: with such a cycle every ended request would stay
    in memory until Python's garbage collector frees it, which takes CPU time.
    """

    def __init__(
        self,
        request: PromptRequest,
        *,
        cluster: Cluster,
        policy: RequestPolicy,
        clock: Callable[[], float],
        timing: RequestTiming,
    ) -> None:
        self._request = request
        self._cluster = cluster
        self._policy = policy
        self._clock = clock
        self._timing = timing
        self._block_hashes = PromptBlockHashes(
            request.token_ids, request.cache_salt, request.lora, request.media, request.num_bidirectional_tokens
        )
        self._running: set[Attempt] = set()
        self._num_started = 0
        self._avoided: frozenset[InstanceId] = frozenset()
        """Instances that failed this request; placement takes them only if no other instance is left."""
        self._preferred_decode: InstanceId | None = None
        """Decode instance that has blocks of this request from an earlier attempt."""

    def start(
        self,
        sequences: Sequence[TokenSequence],
        *,
        owner: AttemptOwner,
        num_replays: int,
        needs_prompt_logprobs: bool,
        admit: Callable[[Placement], bool],
    ) -> NoCapacity | None:
        """Choose instances for sequences that have the same tokens so far, and send the sequences to them as one
        attempt.

        `sequences` is one sequence, or several without tokens; `num_replays` is how often they were replayed. `owner`
        receives the instances' answers. Return the reason if no instance can take them. None means that the attempt
        runs, or that `admit` has returned False for the first attempt: then the request waits in the router. Raises
        `ApiError` if `admit` rejects the request or if it cannot be encoded.
        """
        token_ids = self._request.token_ids + sequences[0].token_ids
        num_generated = len(sequences[0].token_ids)
        block_hashes = self._block_hashes.extended(token_ids) if num_generated else self._block_hashes
        placement = self._place(block_hashes, num_sequences=len(sequences), num_generated=num_generated)
        if isinstance(placement, NoCapacity):
            return placement
        # A replay is never queued or rejected: the request was admitted when its first attempt started.
        if not self.has_started and not admit(placement):
            return None
        attempt = self._new_attempt(owner, placement, sequences, position=num_generated, num_replays=num_replays)
        try:
            owner.on_placed(placement)
            root = block_hashes.root(placement.final_worker.layout)
            tenant_root = block_hashes.tenant_root(placement.final_worker.layout)
            work = self._work(attempt, token_ids, root, tenant_root, needs_prompt_logprobs=needs_prompt_logprobs)
            self._send(attempt, placement, work, block_hashes)
        except BaseException as exc:
            # Without leases no message was sent, so that no worker knows the attempt.
            self.end(attempt, cancel=bool(attempt.leases))
            if isinstance(exc, WireError):
                message = f"the request cannot be encoded for an instance: {exc}"
                raise BadRequestError(message, code="unsendable") from exc
            raise
        return None

    @property
    def has_started(self) -> bool:
        """True if an attempt was started before, so that the next one is a replay."""
        return self._num_started > 0

    def with_sequence(self, index: int) -> list[Attempt]:
        """Return the running attempts that generate the sequence with this index."""
        return [attempt for attempt in self._running if index in attempt.sequences]

    def end(self, attempt: Attempt, *, cancel: bool) -> None:
        """End an attempt, if it is still running. With `cancel`, also send `Cancel` to its instances."""
        if attempt in self._running:
            self._running.discard(attempt)
            attempt.end(cancel=cancel)

    def cancel_all(self) -> None:
        """End all running attempts and send `Cancel` to their instances."""
        for attempt in list(self._running):
            self.end(attempt, cancel=True)

    def avoid(self, culprit: InstanceId) -> bool:
        """Avoid the instance `culprit` for all later attempts of this request. Return True if it has not failed this
        request before.
        """
        is_first_failure = culprit not in self._avoided
        self._avoided |= {culprit}
        return is_first_failure

    def prefer_decode_of(self, attempt: Attempt, *, culprit: InstanceId) -> None:
        """Prefer the decode instance of a failed attempt for the next one: blocks that have arrived there can be
        reused.

        If that instance is itself the `culprit`, no instance is preferred.
        """
        decode = attempt.decode
        survives = decode is not None and decode.record.instance != culprit
        self._preferred_decode = decode.record.instance if decode is not None and survives else None

    def record_failure(self, culprit: InstanceId, code: ErrorCode) -> None:
        """Count a failure in the circuit breaker of the instance `culprit`, if the error code means that the instance
        is broken.
        """
        worker = self._cluster.worker(culprit)
        # An instance that is full or drains is healthy. An open circuit breaker would take it from all requests.
        if worker is not None and code in ("internal", "timeout", "handoff_failed"):
            worker.circuit_breaker.failed(self._clock())

    def _place(
        self, block_hashes: PromptBlockHashes, *, num_sequences: int, num_generated: int
    ) -> Placement | NoCapacity:
        """Choose the instances for an attempt by the present state of the cluster, or return the reason why none can
        take it. `num_generated` is the number of tokens that each sequence has already.
        """
        request = self._request
        demand = Demand(
            num_tokens=len(block_hashes.token_ids) + request.source_tokens,
            num_sequences=num_sequences,
            max_new_tokens=request.sampling.max_tokens - num_generated,
            avoided=self._avoided,
            preferred_decode=self._preferred_decode,
            itl_s=self._timing.slo.itl_s,
            ttft_s=self._timing.ttft_budget_s(self._clock()),
            has_images=bool(request.media),
            media=request.media,
            files=request.files,
            source_tokens=request.source_tokens,
        )
        view = self._cluster.view(
            block_hashes.hashes,
            request.model,
            request.lora,
            has_images=demand.has_images,
            embeddings=block_hashes.embeddings,
        )
        return place(demand, view, self._policy.policy)

    def _new_attempt(
        self,
        owner: AttemptOwner,
        placement: Placement,
        sequences: Sequence[TokenSequence],
        *,
        position: int,
        num_replays: int,
    ) -> Attempt:
        """Create an attempt on the instances of `placement` and add it to the running ones. Its first token has index
        `position` in each sequence.
        """
        prefill = self._worker_of(placement.prefill)
        attempt = Attempt(
            owner=owner,
            request_id=RequestId(f"{self._request.request_id}~{self._num_started}"),
            sequences={sequence.index: sequence for sequence in sequences},
            prefill=prefill,
            decode=self._worker_of(placement.decode),
            position=position,
            num_replays=num_replays,
            decode_has_blocks=prefill is None,  # one worker computes prompt and answer: nothing is handed off
        )
        self._num_started += 1
        self._running.add(attempt)
        return attempt

    def _worker_of(self, candidate: Candidate | None) -> WorkerState | None:
        return self._cluster.worker(candidate.instance) if candidate is not None else None

    def _work(
        self,
        attempt: Attempt,
        token_ids: list[int],
        root: BlockHash,
        tenant_root: BlockHash,
        *,
        needs_prompt_logprobs: bool,
    ) -> Work:
        """Return the part of the messages that says what is computed.

        `root` is the root hash in the KV layout of the instance that computes the prompt. `Attempt.start` replaces it
        for an instance of another layout, whose block hashes differ. `tenant_root` is that of all prompts of the
        tenant.
        """
        request = self._request
        sampling = request.sampling
        if not needs_prompt_logprobs and sampling.prompt_logprobs is not None:
            # An earlier attempt has returned them. Asking again would forbid the worker to use cached blocks.
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        deadline = self._timing.at + self._policy.request_timeout_s
        return Work(
            request_id=attempt.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(request.token_ids),
            sampling=sampling,
            root=root,
            tenant_root=BlockHash(b"") if tenant_root == root else tenant_root,
            num_bidirectional_tokens=request.num_bidirectional_tokens,
            sequences=sequence_indexes(list(attempt.sequences.values())),
            priority=request.priority,
            lora=request.lora,
            media=list(request.media),
            timeout_s=max(0.1, deadline - self._clock()),
            itl_s=self._timing.slo.itl_s,
            trace_headers=dict(request.trace_headers),
        )

    def _send(self, attempt: Attempt, placement: Placement, work: Work, block_hashes: PromptBlockHashes) -> None:
        """Send the messages of a new attempt to its instances. If this raises, the caller ends the attempt."""
        plan = placement.final_worker.pull
        sent = self._images_to_send(attempt, placement.final_worker)
        if sent.num_unsent_tokens:
            attempt.omits_images = True
            work = msgspec.structs.replace(work, num_unsent_tokens=sent.num_unsent_tokens)
        encodings = self._encodings(attempt, placement, block_hashes, work.timeout_s)
        attempt.start(
            work,
            placement,
            block_hashes,
            # A handoff must not run longer than the request itself.
            handoff_timeout_s=min(self._policy.handoff_timeout_s, work.timeout_s),
            pull_from=self._cluster.worker(plan.source) if plan is not None else None,
            images=sent.images,
            encodings=encodings,
        )
        until = self._clock() + self._policy.expected_blocks_ttl_s
        for encoding in encodings:
            encoding.worker.circuit_breaker.begin_attempt(attempt.request_id, self._clock())
            names = block_hashes.embeddings(encoding.worker.record.layout)
            expected = [names[digest] for digest in encoding.fetch.digests]
            self._cluster.index.expect(encoding.worker.record.instance, expected, until=until)
        for worker in attempt.workers():
            hashes: Sequence[BlockHash] = block_hashes.hashes(worker.record.layout)
            if worker is (attempt.prefill or attempt.decode):
                checkpoints = _expected_checkpoints(hashes, worker.record.layout, placement.final_worker.branches)
                hashes = [*hashes, *checkpoints]
            self._record_sent(attempt, worker, hashes)

    def _images_to_send(self, attempt: Attempt, candidate: Candidate) -> SentImages:
        """Return the images that are sent to the instance that computes the prompt: all of them, unless it has reported
        that their KV is cached.
        """
        request, worker = self._request, attempt.prefill or attempt.decode
        assert worker is not None
        # Asking for the logprobs of a prompt forbids cached blocks. A replay may follow from missing images.
        is_read_again = self._num_started > 1 or request.sampling.prompt_logprobs is not None or request.source_tokens
        if is_read_again or not worker.record.finds_unsent_images or self._clock() < worker.needs_images_until:
            return SentImages(list(request.images))
        # The last token is always computed, and so is its block.
        block_tokens = candidate.layout.block_tokens
        last_block = (len(request.token_ids) - 1) // block_tokens * block_tokens
        num_cached = min(candidate.held_tokens, last_block)
        return images_to_send(request.images, request.files, request.media, num_cached=num_cached)

    def need_images(self, attempt: Attempt) -> None:
        """Send all images to the instance that computed the prompt of an attempt, for some time: it had evicted their
        KV.
        """
        worker = attempt.prefill or attempt.decode
        if worker is not None:
            worker.needs_images_until = self._clock() + ALL_IMAGES_S

    def _encodings(
        self, attempt: Attempt, placement: Placement, block_hashes: PromptBlockHashes, timeout_s: float
    ) -> list[ImageEncoding]:
        """Return the messages to and about the encode instances that the placement names."""
        sink = attempt.prefill or attempt.decode
        if not placement.encoding or sink is None:
            return []
        workers = {self._cluster.worker(instance): digests for instance, digests in placement.encoding.items()}
        return image_encodings(
            attempt.request_id,
            {worker: digests for worker, digests in workers.items() if worker is not None},
            sink,
            block_hashes,
            images=dict(zip(self._request.files, self._request.images, strict=True)),
            has_cached=lambda worker, name: worker.record.instance in self._cluster.index.held([name]),
            timeout_s=min(self._policy.encode_timeout_s, timeout_s),
        )

    def on_encoded(self, attempt: Attempt, failed: Sequence[InstanceId]) -> None:
        """Record which encode instances have failed the prompt of an attempt; the others have done their part."""
        for worker in attempt.encoders:
            if worker.record.instance in failed:
                worker.circuit_breaker.failed(self._clock())
            else:
                worker.circuit_breaker.succeeded()

    def _record_sent(self, attempt: Attempt, worker: WorkerState, hashes: Sequence[BlockHash]) -> None:
        """Record in the router's block index that an instance has been sent the prompt and will soon cache the blocks
        with these hashes.

        Without this, prompts with the same prefix that come before the instance's cache events would be computed
        somewhere else.
        """
        now = self._clock()
        worker.circuit_breaker.begin_attempt(attempt.request_id, now)
        self._cluster.index.expect(worker.record.instance, hashes, until=now + self._policy.expected_blocks_ttl_s)


def _expected_checkpoints(hashes: Sequence[BlockHash], layout: KVLayout, branches: Sequence[int]) -> list[BlockHash]:
    """Return the hashes under which the router's block index will know the checkpoints (of recurrent states) of a
    prompt that is computed now: those after its last full block, and those after each number of tokens in `branches`.
    """
    if not layout.state_bytes:
        return []
    ends = {len(hashes), *(at // layout.block_tokens for at in branches)}
    return [checkpoint_hash(hashes[end - 1], layout.state_blocks - 1) for end in ends if 0 < end <= len(hashes)]
