"""Genuine oneCCL between two processes, over plain memory and over genuine SYCL USM. Run by `make test-intel`.

The contract suite's tests of two processes run there too, through the same library.
"""

from importlib.util import find_spec

import pytest

from baton_serve.kvtransfer.transports.oneccl.library import find_library
from tests.contract.test_transports import only, run, wanted
from tests.contract.test_transports_processes import text, to_here
from tests.contract.transports_pair import LAYOUT, NUM_BLOCKS, running
from tests.contract.transports_peer import peer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_library() is None or find_spec("dpctl") is None, reason="needs oneCCL: make test-intel"),
]


@pytest.mark.parametrize("kind", ["MemoryUSMHost", "MemoryUSMShared", "MemoryUSMDevice"])
@pytest.mark.parametrize("transport", ["oneccl", "zeromq"])
def test_blocks_travel_between_usm_allocations(kind: str, transport: str) -> None:
    from tests.intel.usm_memory import UsmMemory

    async def test() -> None:
        settings = only(transport)
        memory = UsmMemory(NUM_BLOCKS, LAYOUT.block_bytes, kind)
        assert kind.lower().endswith(memory.usm_type)
        async with (
            peer("prefill-0", settings, 7, module="tests.intel.usm_memory") as source,
            running("decode-0", settings, memory=memory) as here,
        ):
            await here.node.connect(source.address)
            ticket = to_here(source, here)
            await source.ask("open", full=text(ticket))
            await source.ask("publish", ticket=ticket.ticket, blocks=[(i, 47 - i) for i in range(NUM_BLOCKS)])
            await source.ask("finish", ticket=ticket.ticket)
            result = await here.node.fetch(ticket, wanted(*((i, i) for i in range(NUM_BLOCKS))))
            assert result.transport == transport
            assert all(here.holds(i, seed=i) for i in range(NUM_BLOCKS))
            (link,) = here.node.links()
            assert ("libccl" in link.reason.rpartition("; ")[2]) == (transport == "oneccl")

    run(test())
