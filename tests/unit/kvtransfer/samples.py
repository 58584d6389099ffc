"""Values that the tests of this package share."""

from baton_serve.contracts.block_layout import KVLayout
from baton_serve.contracts.identity import BlockHash, Generation, InstanceId, TicketId
from baton_serve.contracts.messages import Ticket
from baton_serve.kvtransfer.session.steps import SessionLimits

LAYOUT = KVLayout(fingerprint="tiny", num_layers=2, num_kv_heads=2, block_tokens=16, head_dim=8, dtype="float32")
LIMITS = SessionLimits(connect_timeout_s=2, answer_timeout_s=3, lease_s=4, lease_grace_s=0.5, max_attempts=3)
TICKET = Ticket(
    ticket=TicketId("t"),
    source=InstanceId("p"),
    source_generation=Generation(1),
    source_address="tcp://127.0.0.1:1",
    sink=InstanceId("c"),
    sink_generation=Generation(2),
    timeout_s=20,
)


def name(index: int) -> BlockHash:
    return BlockHash(bytes([index]) * 16)
