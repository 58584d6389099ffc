"""A cluster with a key: what encrypts nothing carries nothing to another machine."""

import asyncio
import itertools

import msgspec
import pytest
import zmq

from baton_serve.kvtransfer import Refused, TransferSettings
from baton_serve.kvtransfer.control_messages import Host
from baton_serve.kvtransfer.liveness import this_host
from tests.contract.transports_pair import SETTINGS, Pair, name, pair_of


def with_key(*transports: str) -> TransferSettings:
    public, secret = zmq.curve_keypair()
    return msgspec.structs.replace(
        SETTINGS, transports=transports, curve_secret_key=secret, curve_public_key=public, oneccl_backend="gloo"
    )


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    boots = itertools.count()

    def host() -> Host:
        return msgspec.structs.replace(this_host(), boot_id=f"machine-{next(boots)}")

    monkeypatch.setattr("baton_serve.kvtransfer.node.this_host", host)


async def handoff(pair: Pair) -> str:
    ticket = pair.ticket()
    pair.producer.fill(0, seed=1)
    pair.producer.node.open(ticket)
    pair.producer.node.publish(ticket.ticket, [(name(0), 0)])
    pair.producer.node.finish(ticket.ticket, b"")
    result = await pair.consumer.node.fetch(ticket, [(name(0), 7)])
    assert pair.consumer.holds(7, seed=1)
    return result.transport


@pytest.mark.usefixtures("two_machines")
def test_oneccl_between_machines_is_refused_with_the_remedy() -> None:
    async def test() -> None:
        async with pair_of(with_key("oneccl")) as pair:
            with pytest.raises(Refused, match=r"not encrypted .* another machine.*use zeromq"):
                await pair.consumer.node.fetch(pair.ticket(), [(name(0), 0)])

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.usefixtures("two_machines")
def test_the_next_transport_of_the_ladder_is_used_and_the_reason_kept() -> None:
    async def test() -> None:
        async with pair_of(with_key("oneccl", "zeromq")) as pair:
            assert await handoff(pair) == "zeromq"
            (link,) = pair.consumer.node.links()
            assert "oneccl: by gloo, it is not encrypted" in link.reason

    asyncio.run(asyncio.wait_for(test(), 20))


def test_oneccl_on_one_machine_goes_on_with_a_key() -> None:
    async def test() -> None:
        async with pair_of(with_key("oneccl")) as pair:
            assert await handoff(pair) == "oneccl"

    asyncio.run(asyncio.wait_for(test(), 20))
