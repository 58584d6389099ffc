"""Keeps a ladder (order of transports) for each producing process. A ladder outlives connections, but not the
process.
"""

from collections import OrderedDict

from baton_serve.contracts.identity import Generation, InstanceId
from baton_serve.kvtransfer.control_messages import Welcome
from baton_serve.kvtransfer.ladder import Ladder, LadderLimits, Rung
from baton_serve.kvtransfer.settings import PROBED, TransferSettings
from baton_serve.kvtransfer.transports.port import Transport

MAX_LADDERS = 4096
"""Largest number of ladders to remember; the least recently used is dropped. It bounds the memory if peers restart
often.
"""


class LadderTable:
    """Keeps one `Ladder`, the order in which transports are tried, for each producer process that this node has met.
    Use it only on the event loop.
    """

    def __init__(self, settings: TransferSettings, transports: dict[str, Transport]) -> None:
        self._settings = settings
        self._transports = transports
        self._known: OrderedDict[tuple[str, InstanceId, Generation], Ladder] = OrderedDict()

    def of(self, address: str, welcome: Welcome) -> Ladder:
        """Return the ladder for the producer that sent `welcome` from this address; create it at the first call. A
        restarted process (a new generation) gets a new one.
        """
        # The generation is part of the key: a restarted process begins with a new ladder, since its faults may be gone.
        key = (address, welcome.instance, welcome.generation)
        ladder = self._known.get(key)
        if ladder is None:
            ladder = self._known[key] = self._new(welcome)
        # The order is that of the last use, so that the ladder of a live peer is not dropped.
        self._known.move_to_end(key)
        while len(self._known) > MAX_LADDERS:
            self._known.popitem(last=False)
        return ladder

    def _new(self, welcome: Welcome) -> Ladder:
        settings = self._settings
        rungs: list[Rung] = []
        notes: list[str] = []
        for name, transport in self._transports.items():
            if name in welcome.transports:
                # A transport without dialects is one rung.
                rungs += [Rung(name, dialect) for dialect in transport.dialects] or [Rung(name)]
            else:
                notes.append(f"{name}: not offered by the producer")
        if settings.peer_access == "0" and "auto" in settings.transports:
            notes.append(f"{PROBED}: left out by CCL_TOPO_P2P_ACCESS=0")
        return Ladder(
            rungs,
            unproved=settings.unproved(),
            forced=settings.forced(),
            notes=notes,
            limits=LadderLimits(retry_s=settings.probe_retry_s),
        )
