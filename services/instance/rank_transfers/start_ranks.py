"""Starts the transfer nodes of all ranks of an instance, or decides that only whole blocks are sent."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.engine import Engine
from baton_serve.kvtransfer import LocalRank, RankPort, TransferError, TransferObserver, TransferSettings
from baton_serve.services.instance.rank_transfers.part_client import RankStartError, RemoteRank
from baton_serve.services.instance.rank_transfers.part_memory import PartMemory, describe_part, part_node
from baton_serve.services.instance.rank_transfers.part_messages import StartPart

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedRanks:
    """The ranks that move their parts themselves, rank 0 first, and the hash of how they divide blocks. Without ranks
    only whole blocks are moved.
    """

    ranks: Sequence[RankPort] = ()
    division: str = ""


async def start_ranks(
    engine: Engine,
    instance: InstanceId,
    generation: Generation,
    *,
    settings: TransferSettings,
    observer: TransferObserver,
    on_broken: Callable[[str], None],
) -> StartedRanks:
    """Start the node of each rank's part. Return no ranks if they do not have memory of their own, or if one cannot
    start its node: then whole blocks are moved.

    `settings` are those of the node of whole blocks. `on_broken` is called if a rank's transfers cannot be controlled
    any more. The caller closes the ranks.
    """
    if not engine.part_links:
        return StartedRanks()
    # Only the node of whole blocks has the port that the user chose.
    own = msgspec.structs.replace(settings, bind=settings.bind.rpartition(":")[0] + ":*", parts=1)
    layout, count = repr(engine.layout), 1 + len(engine.part_links)
    memory, division = PartMemory(engine.kv), describe_part(engine.kv, layout, 0, count)
    others = [RemoteRank(link, observer, on_broken) for link in engine.part_links]
    orders = [StartPart(instance, generation, own, other.number, count, layout) for other in engine.part_links]
    ranks: list[RankPort] = list(others)
    try:
        node = part_node(instance, generation, memory=memory, division=division, settings=own, observer=observer)
        await node.start()
        ranks.insert(0, LocalRank(node, memory.mark))
        starts = [other.start(order) for other, order in zip(others, orders, strict=True)]
        for failed in await asyncio.gather(*starts, return_exceptions=True):
            if failed is not None:
                raise failed
    except BaseException as exc:
        for rank in ranks:
            await rank.close()
        if not isinstance(exc, TransferError | RankStartError):
            raise
        logger.warning("KV blocks are moved through host memory, not by each rank: %s", exc)
        return StartedRanks()
    parts = [division, *(other.division for other in others)]
    return StartedRanks(ranks, hashlib.sha256(" ".join(parts).encode()).hexdigest()[:32])
