"""Sends activations between pipeline-parallel stages, through the collective library of the device.

Each stage sends to the next one; the last one sends the rows whose logits are needed back to the first. Both directions
have a process group of their own: nccl and xccl run the operations of two ranks in one order, so that a send of the
first stage would wait for a send of the last one, and both forever.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_RUNNING_SENDS = 2
"""Number of sends to the next stage that may still run when another one starts; it bounds the memory of their
activations."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of the neighbouring pipeline stages with which one rank exchanges activations. `before` is None on the
    first stage, and `after` on the last one.
    """

    before: int | None
    after: int | None
    first: int
    """The rank of the first stage that gets the results."""
    last: int
    """The rank of the last stage that sends them."""


class StageLinks:
    """One rank's connections to the other stages of the pipeline. All ranks must send and receive for the same steps in
    the same order.
    """

    def __init__(
        self, forward: Any, back: Any, peers: Peers, like: Tensor, *, is_first: bool, max_in_flight: int
    ) -> None:
        """Use two process groups of torch.distributed: `forward` sends to the next stage, `back` from the last stage to
        the first. `like` is an empty tensor [0, hidden_size] with device and dtype of the activations. `is_first` says
        that this rank belongs to the first stage. `max_in_flight` is the largest number of steps that the stages
        compute at the same time.
        """
        self._forward, self._back, self._peers, self._like = forward, back, peers, like
        self._is_first = is_first
        self.is_last = peers.after is None
        self._is_batched = _has_batches(forward, like.device)
        # The first stage may wait for an answer of the last one before it receives results, so that the last one must
        # not wait for the first. Results are few rows.
        self._max_running = max_in_flight if self.is_last else MAX_RUNNING_SENDS
        self._running: deque[tuple[Any, Tensor]] = deque()

    def send(self, hidden: Tensor) -> None:
        """Send activations [rows, hidden] to the next stage, or from the last stage to the first one. Return without
        waiting, unless too many earlier sends are still running.
        """
        group, peer = self._forward, self._peers.after
        if peer is None:
            group, peer = self._back, self._peers.first
        self._start_send(group, hidden.contiguous(), peer)

    def pass_on(self, values: Tensor) -> None:
        """Overwrite the contiguous tensor `values` of every stage with that of the first one, and return without
        waiting for later stages. The first stage must not change it before they have received it.
        """
        if self._peers.before is not None:
            self._receive_into(values, self._forward, self._peers.before)
        if self._peers.after is not None:
            self._start_send(self._forward, values, self._peers.after)

    def receive(self, num_rows: int) -> Tensor | None:
        """Return the activations [num_rows, hidden] of the stage before this one, in the order in which it sent them;
        None on the first stage.
        """
        return None if self._peers.before is None else self._received(self._forward, num_rows, self._peers.before)

    def receive_result(self, num_rows: int) -> Tensor:
        """Return the next activations [num_rows, hidden] that the last stage has sent to the first. Call it on ranks of
        the first stage only.
        """
        assert self._is_first
        return self._received(self._back, num_rows, self._peers.last)

    def received_rows(self, max_rows: int) -> Tensor | None:
        """Return new memory for `max_rows` rows of activations of the stage before, [max_rows, hidden], all rows
        different; None on the first stage.
        """
        if self._peers.before is None:
            return None
        # Not zeros, from which layers compute zeros: a proof of graphs reads this memory before anything is received.
        # The numbers of one row differ as much as those of several, or norms would make them equal.
        numbers = torch.arange(max_rows * self._like.shape[1], device=self._like.device).sin()
        return numbers.to(self._like.dtype).view(max_rows, -1)

    def waiting_bytes(self, num_rows: int) -> int:
        """Return the most memory in bytes that activations of `num_rows` rows take while they are sent, and while the
        device has not come to a step whose input this rank has received.
        """
        return (self._max_running + 1) * num_rows * self._like.shape[1] * self._like.element_size()

    def abort(self) -> None:
        """Make `send` and `receive` return if they wait for a rank that has exited, if the backend supports that.
        Callable from any thread.
        """
        # On the host both directions are one group, which is aborted once.
        for group in {id(group): group for group in (self._forward, self._back)}.values():
            if hasattr(group, "abort"):
                group.abort()

    def _received(self, group: Any, num_rows: int, peer: int) -> Tensor:
        hidden = torch.empty((num_rows, self._like.shape[1]), dtype=self._like.dtype, device=self._like.device)
        self._receive_into(hidden, group, peer)
        return hidden

    def _receive_into(self, values: Tensor, group: Any, peer: int) -> None:
        # With nccl, `wait` holds up the device's stream only, and the host goes on.
        self._started(group, lambda: group.recv([values], peer, 0)).wait()

    def _start_send(self, group: Any, values: Tensor, peer: int) -> None:
        """Start a send, after waiting for the oldest one if too many are running."""
        # The library reads the tensor later, so it must stay alive until then.
        self._running.append((self._started(group, lambda: group.send([values], peer, 0)), values))
        while len(self._running) > self._max_running:
            work, _ = self._running.popleft()
            work.wait()

    def _started(self, group: Any, start: Callable[[], Any]) -> Any:
        """Call `start`, which starts a send or a receive of `group`, and return its work, for which one can wait."""
        if not self._is_batched:
            return start()
        # A batch of one, as `torch.distributed.batch_isend_irecv` makes it in more calls: nccl warns of others, because
        # it runs the operations of a group in order, as they must run here.
        group._start_coalescing(self._like.device)
        try:
            start()
        finally:
            work = group._end_coalescing(self._like.device)
        return work


def _has_batches(group: Any, device: torch.device) -> bool:
    """Return whether the library of a process group supports batches of operations on `device`."""
    # A gloo group of `World` is the library's own object, which has none.
    backend = group._get_backend(device) if hasattr(group, "_get_backend") else None
    return bool(getattr(backend, "supports_coalescing", False))
