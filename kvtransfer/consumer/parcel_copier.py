"""Decides whether received blocks are copied at once or in a worker thread, and returns credit for them."""

from collections.abc import Callable, Sequence
from functools import partial

import zmq

from baton_serve.kvtransfer.consumer.copy_jobs import (
    BufferedParcel,
    CopyJob,
    CopyResult,
    ParcelAssembly,
    StopFlag,
    StreamedParcel,
)
from baton_serve.kvtransfer.consumer.fetching import Fetching
from baton_serve.kvtransfer.consumer.link import ConsumerLink
from baton_serve.kvtransfer.context import NodeContext
from baton_serve.kvtransfer.control_messages import Blocks, Bytes, Got
from baton_serve.kvtransfer.session.steps import BlockPlacement

OnCopied = Callable[[Fetching, int, CopyResult], None]
"""Callback that receives results of copies: their fetch, the number of bytes of each placement, and the results."""


class ParcelCopier:
    """Copies the received blocks of all fetches of one node to their destinations, in worker threads or, if they are
    few bytes, at once. It reports each placement once to `on_copied`. Use it only on the event loop.
    """

    def __init__(self, context: NodeContext, on_copied: OnCopied) -> None:
        self._context = context
        self._on_copied = on_copied

    def copy(
        self, fetching: Fetching, placements: Sequence[BlockPlacement], message: Blocks, frames: Sequence[zmq.Frame]
    ) -> None:
        """Copy the blocks `placements` of a fetch, which `message` announces and `frames` may contain: at once if they
        are few bytes, in a worker thread if there are more, or piece by piece if their bytes come in later messages.
        """
        context, link, receiver = self._context, fetching.link, fetching.receiver
        assert link is not None and receiver is not None
        size = fetching.block_bytes // message.parts
        num_bytes = len(message.pieces) * size
        # Count only wanted bytes: `delivered` counts the same placements when they end.
        link.meter.announced(len(placements) * size, context.clock())
        report = partial(self._reported, fetching, link, size)
        if message.epoch:
            assembly = ParcelAssembly(receiver, placements, size)
            incoming = StreamedParcel(assembly, fetching.stop, num_bytes, context.workers, report, parts=message.parts)
            self._expect(link, message, incoming)
            return
        if fetching.is_buffered and not frames:
            assembly = ParcelAssembly(receiver, placements, size)
            link.receipts[message.parcel] = BufferedParcel(
                assembly, num_bytes=num_bytes, stop=fetching.stop, workers=context.workers, report=report
            )
            return
        # All pieces of a message have the same number of frames, in the order of the pieces.
        each = len(frames) // len(message.pieces)
        buffers = [[frame.buffer for frame in frames[p.position * each : (p.position + 1) * each]] for p in placements]
        job = CopyJob(receiver, placements, buffers, fetching.stop)
        # Only a parcel that the producer has staged needs a receipt of its own: its slots are freed by it.
        credit, parcel = sum(len(frame) for frame in frames), message.parcel if receiver.stages else 0
        if len(placements) * size <= context.settings.inline_bytes and not receiver.stages:
            report(job.run(), credit)
            return

        def run() -> None:
            context.workers.post(partial(report, job.run(), credit, parcel))

        context.workers.submit(run)

    def skip(self, link: ConsumerLink, message: Blocks, frames: Sequence[zmq.Frame]) -> None:
        """Read and discard the bytes of announced blocks that no fetch wants any more. These bytes must be read,
        because later bytes of the same channel lie behind them.
        """
        link.credit(sum(len(frame) for frame in frames))
        if not message.epoch and not frames:
            link.send(Got(0, message.parcel))
        if message.epoch and (receiver := link.receiver) is not None:
            size, parts = link.block_bytes // message.parts, message.parts
            assembly, num_bytes, report = (
                ParcelAssembly(receiver, [], size),
                len(message.pieces) * size,
                lambda _, credit: link.credit(credit),
            )
            incoming = StreamedParcel(assembly, StopFlag(), num_bytes, self._context.workers, report, parts=parts)
            self._expect(link, message, incoming)

    def take(self, link: ConsumerLink, message: Bytes, frames: list[zmq.Frame]) -> None:
        """Copy `frames`, further bytes of a parcel that an earlier message on the connection `link` announced."""
        receipt = link.receipts.get(message.parcel)
        if receipt is None:
            link.credit(sum(len(frame) for frame in frames))
        elif receipt.feed([frame.buffer for frame in frames]):
            del link.receipts[message.parcel]

    def stop(self, fetching: Fetching) -> None:
        """Prevent the copies of the fetch's current attempt that have not begun; each is reported as abandoned. Running
        copies go on.
        """
        fetching.stop.is_set = True
        if fetching.link is not None:
            for receipt in fetching.link.receipts.values():
                if receipt.stop is fetching.stop:
                    # A parcel whose bytes do not come any more would never look at the flag by itself.
                    receipt.schedule_run()

    def _reported(
        self, fetching: Fetching, link: ConsumerLink, size: int, result: CopyResult, credit: int, parcel: int = 0
    ) -> None:
        """Pass the results of copies to the fetch, and return `credit`, a number of bytes, to the producer. `size` is
        the number of bytes of each placement. `parcel` is the number of the parcel if the producer has staged it and
        waits to free it, otherwise 0.
        """
        if parcel:
            link.send(Got(credit, parcel))
        elif credit:
            link.credit(credit)
        ended = len(result.copied) + len(result.damaged) + len(result.abandoned)
        if ended:
            link.meter.delivered(ended * size, self._context.clock())
        self._on_copied(fetching, size, result)

    def _expect(self, link: ConsumerLink, message: Blocks, incoming: StreamedParcel) -> None:
        stream = link.stream(message.epoch)
        if stream is None:
            incoming.abandon("the pair was given up")
        else:
            stream.expect(message.pieces, incoming)
