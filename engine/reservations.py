"""Blocks that another instance fills, and pins for fetches by name. Pure.

The decode side of a handoff: reserve -> (mark_received)* -> admit, or admit_locally when it failed. A prompt that is
read behind another instance: reserve -> (mark_received)*, follow in between, or read_alone if that one was lost. Where
an earlier part of the prompt is computed here meanwhile (`after`), its blocks are shared as soon as they are there.
Whoever drives this must not free (cancel, admit_locally) while a copy may still write to the reserved blocks.
"""

from collections.abc import Iterable, Mapping

from contracts.identity import BlockName, RequestId
from contracts.messages import Work
from contracts.naming import block_names
from engine.errors import UsageError
from engine.outputs import CompletedBlocks, NamedBlock, Place, Reservation
from engine.roster import Roster
from engine.sequence import Mode, Request, Sequence, State


class Reservations:
    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._sharing: list[RequestId] = []

    def reserve(
        self,
        work: Work,
        now: float,
        mode: Mode = "generate",
        after: RequestId | None = None,
        place: Place | None = None,
    ) -> Reservation | None:
        """Pins what is cached and allocates the rest, but for what the request `after` computes, in whose place it is.
        None: no room now, or that request is not there, or of other tokens."""
        roster = self._roster
        pool, block_tokens = roster.pool, roster.limits.block_tokens
        lead = roster.requests.get(after) if after is not None else None
        if after is not None and (lead is None or not _is_part(lead.work, work)):
            return None
        names = _names_of(work, block_tokens, lead)
        num_full = len(work.token_ids) // block_tokens
        # Of a prompt that is read here, at least the last token is computed.
        reusable = (len(work.token_ids) - 1) // block_tokens if mode == "prefill" else num_full
        prefix = pool.find(names[:reusable])
        led = min(len(lead.work.token_ids) // block_tokens, reusable) if lead is not None else 0
        awaited = range(len(prefix), max(led, len(prefix)))
        needed = len(names) - awaited.stop
        spare = pool.num_total // 100 if roster.running else 0
        if lead is not None:  # it takes its memory early, so nobody who waits may lack it
            spare += sum(roster.num_blocks_for(len(waiting.token_ids)) for waiting in roster.waiting())
        if pool.num_free - pool.num_taken(prefix) - needed < spare:
            return None
        trunk = roster.enrol(work, mode, now, place)
        if lead is not None:
            trunk.request.come_after(lead)
        cached = pool.take(prefix)
        fresh = pool.allocate(needed)
        assert fresh is not None
        trunk.state = State.RESERVED
        trunk.blocks = cached + fresh
        trunk.names = names[:num_full]
        missing = [NamedBlock(n, b) for n, b in zip(names[awaited.stop :], fresh, strict=True)]
        trunk.request.missing, trunk.request.awaited = dict(missing), awaited
        trunk.request.cached_tokens = len(cached) * block_tokens
        if awaited:
            self._sharing.append(work.request_id)
        known = [NamedBlock(n, b) for n, b in zip(names, cached, strict=False)] if mode == "prefill" else []
        trunk.request.num_published = len(known)
        return Reservation(work.request_id, names, len(cached), missing, known)

    def mark_received(self, request_id: RequestId, names: Iterable[BlockName]) -> list[int]:
        """The blocks of that name."""
        blocks: list[int] = []
        request = self._roster.requests.get(request_id)
        if request is None:
            raise UsageError(f"request {request_id} holds no reservation")
        full = set(request.sequences[0].names)
        for name in names:
            block = request.missing.pop(name, None)
            if block is None:
                raise UsageError(f"request {request_id}: block {name.hex()} is not missing")
            blocks.append(block)
            if name in full:
                self._roster.pool.register([name], [block])
        return blocks

    def missing_blocks(self, request_id: RequestId) -> list[int]:
        """Reserved blocks that have not been received; none for a request without a reservation."""
        request = self._roster.requests.get(request_id)
        return list(request.missing.values()) if request is not None else []

    def admit(self, request_id: RequestId, first_tokens: Mapping[int, int]) -> None:
        """All blocks are there: the sequences go on after their first tokens. Those that these tokens end, that were
        cancelled, or that have no token do not."""
        trunk = self._reserved(request_id)
        request = trunk.request
        if request.missing:
            raise UsageError(f"request {request_id}: {len(request.missing)} blocks have not been received")
        trunk.num_computed = len(trunk.token_ids)
        trunk.num_registered = len(trunk.names)
        request.is_first_reported = True
        wanted = {index: token for index, token in first_tokens.items() if index in request.to_start}
        self._roster.start_sequences(trunk, wanted)

    def admit_locally(self, request_id: RequestId) -> None:
        """Computes the prompt here. Blocks that arrived are found again in the cache."""
        trunk = self._reserved(request_id)
        trunk.request.missing.clear()
        self._roster.free_blocks(trunk)
        self._roster.enqueue(trunk)

    def share(self) -> list[CompletedBlocks]:
        """What has been computed since is given to those that were reserved `after` it. Returns what is new to them."""
        if not self._sharing:
            return []
        requests = self._roster.requests
        awaiting = [requests[one] for one in self._sharing if one in requests and requests[one].awaited]
        self._sharing = [request.work.request_id for request in awaiting]
        return [shared for shared in map(self._share, awaiting) if shared.blocks]

    def follow(self, request_id: RequestId, num_tokens: int, now: float) -> None:
        """What comes after the first `num_tokens`, full blocks, joins the batch. Those are being filled, and may be
        marked as received later; none of them is `awaited` any more."""
        trunk = self._reserved(request_id)
        request, block_tokens = trunk.request, self._roster.limits.block_tokens
        num_blocks, rest = divmod(num_tokens, block_tokens)
        first = request.awaited.stop
        if request.awaited:
            raise UsageError(f"request {request_id}: an earlier part of it is not computed yet")
        if rest or not first * block_tokens < num_tokens < len(trunk.token_ids):
            raise UsageError(f"request {request_id}: {num_tokens} tokens are no front of {len(trunk.token_ids)}")
        front = set(trunk.names[:num_blocks])
        request.missing = {name: block for name, block in request.missing.items() if name in front}
        request.started = now
        request.front_tokens = num_tokens - first * block_tokens
        _count_lead(request)
        trunk.num_computed, trunk.num_registered = num_tokens, num_blocks
        self._roster.run(trunk)

    def read_alone(self, request_id: RequestId, now: float) -> bool:
        """What was to come will not: what is not here is computed here, in the blocks that it has; what comes all the
        same may still be marked as received. Before or after `follow`, whose step was not computed. False: there is no
        room for what an earlier part was to compute; ask again."""
        trunk = self._roster.requests[request_id].sequences[0]
        request, pool, block_tokens = trunk.request, self._roster.pool, self._roster.limits.block_tokens
        is_reserved, (start, stop) = trunk.state is State.RESERVED, _ends(request.awaited)
        known = len(trunk.names) if is_reserved else trunk.num_computed // block_tokens
        there = next((n for n, name in enumerate(trunk.names[:known]) if name in request.missing), known)
        if start < stop:
            fresh = pool.allocate(stop - start)
            if fresh is None:
                return False
            trunk.blocks[start:start] = fresh
            request.awaited, there = range(stop, stop), start
        there = min(there, (len(trunk.token_ids) - 1) // block_tokens)
        if is_reserved:
            request.started = now
            request.front_tokens = max(0, there - stop) * block_tokens
            self._roster.run(trunk)
        else:
            request.front_tokens -= trunk.num_computed - there * block_tokens
        _count_lead(request)
        trunk.num_computed, trunk.num_registered = there * block_tokens, there
        return True

    def pin(self, names: Iterable[BlockName]) -> list[NamedBlock]:
        """The longest cached prefix, kept until `unpin`. What lies in the host tier takes free blocks, if there are."""
        roster, pool = self._roster, self._roster.pool
        wanted = list(names)
        prefix = pool.find(wanted)
        if pool.num_taken(prefix) <= pool.num_free:
            blocks = pool.take(prefix)
        else:
            blocks = pool.match(wanted)
            pool.share(blocks)
        pinned = [NamedBlock(name, block) for name, block in zip(wanted, blocks, strict=False)]
        for name, _ in pinned:
            roster.pins[name] = roster.pins.get(name, 0) + 1
        return pinned

    def unpin(self, names: Iterable[BlockName]) -> None:
        roster = self._roster
        blocks: list[int] = []
        for name in names:
            block = roster.pool.block_of(name)
            if block is None or name not in roster.pins:
                raise UsageError(f"block {name.hex()} is not pinned")
            roster.pins[name] -= 1
            if roster.pins[name] == 0:
                del roster.pins[name]
            blocks.append(block)
        roster.pool.release(blocks)

    def _share(self, request: Request) -> CompletedBlocks:
        trunk, pool, (start, stop) = request.sequences[0], self._roster.pool, _ends(request.awaited)
        found = pool.match(trunk.names[start:stop])
        pool.share(found)
        trunk.blocks[start:start] = found
        request.awaited = range(start + len(found), stop)
        request.num_published += len(found)
        named = [NamedBlock(n, b) for n, b in zip(trunk.names[start:], found, strict=False)]
        return CompletedBlocks(request.work.request_id, named)

    def _reserved(self, request_id: RequestId) -> Sequence:
        request = self._roster.requests.get(request_id)
        if request is None or request.sequences[0].state is not State.RESERVED:
            raise UsageError(f"request {request_id} holds no reservation")
        return request.sequences[0]


def _is_part(lead: Work, work: Work) -> bool:
    """Of the same prompt, and before it."""
    return lead.root == work.root and lead.token_ids == work.token_ids[: len(lead.token_ids)]


def _names_of(work: Work, block_tokens: int, lead: Request | None) -> list[BlockName]:
    """Of all its blocks: those that its lead has need not be computed again."""
    known = list(lead.sequences[0].names) if lead is not None and lead.sequences else []
    tokens = work.token_ids[len(known) * block_tokens :]
    parent, start = known[-1] if known else None, len(known) * block_tokens
    return known + block_names(work.root, tokens, block_tokens, parent=parent, media=work.media, start=start)


def _ends(numbers: range) -> tuple[int, int]:
    return numbers.start, numbers.stop


def _count_lead(request: Request) -> None:
    """What the parts before it computed here was not cached, and what others read for them is counted too."""
    lead, request.lead = request.lead, None
    if lead is not None:
        request.cached_tokens, request.host_tokens = lead.cached_tokens, lead.host_tokens
        request.front_tokens += lead.front_tokens
        request.started = lead.started or request.started
