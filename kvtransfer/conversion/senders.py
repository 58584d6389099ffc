"""Sends blocks in a smaller dtype than they are stored in, if the consumer would round them to it anyway."""

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.kvtransfer.block_memory import BlockMemory
from baton_serve.kvtransfer.control_messages import Offer
from baton_serve.kvtransfer.conversion.receivers import as_tensors
from baton_serve.kvtransfer.conversion.tensors import recoded
from baton_serve.kvtransfer.settings import TransferSettings
from baton_serve.kvtransfer.transports.devicecopy import HostArea
from baton_serve.kvtransfer.transports.port import ParcelContent, Prepared
from baton_serve.kvtransfer.transports.zeromq_staged import StagedFrames, hashed, pinned


class NarrowingSender(StagedFrames):
    """Sends blocks to a consumer with a smaller KV dtype: converts them to the layout `wire`, in pinned host memory
    from which they are sent.
    """

    def __init__(
        self, offer: Offer, memory: BlockMemory, settings: TransferSettings, *, layout: KVLayout, wire: KVLayout
    ) -> None:
        super().__init__(offer, settings, wire.block_bytes)
        self._blocks = as_tensors(memory)
        self._layout, self._wire = layout, wire

    def prepare(self, chosen: ParcelContent) -> Prepared:
        """Convert the blocks of a parcel, copy them to pinned host memory and compute their checksums. `chosen.parts`
        is always 1 here: blocks that are converted travel whole.
        """
        source, size, blocks = self._blocks, self._wire.block_bytes, chosen.blocks
        source.check(blocks)
        view = pinned(len(blocks) * size, source.device)
        area = HostArea(view, size, source.device, is_pinned=True)
        with source.on_stream():
            source.after_computing(blocks)
            for place, block in enumerate(blocks):
                area.fill(place, recoded(source.tensor[block : block + 1], self._layout, self._wire), source)
        source.wait()
        views = [view[place * size : (place + 1) * size] for place in range(len(blocks))]
        return Prepared(blocks, hashed(views, chosen.checked), [view])
