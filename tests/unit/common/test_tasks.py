"""A task that forgets a cancellation, as `asyncio.wait_for` may, ends all the same."""

import asyncio

from baton_serve.services.common.process_lifecycle import cancel_all


def test_a_cancellation_that_is_forgotten_is_said_again() -> None:
    async def forgetful() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    async def failing() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ZeroDivisionError

    async def test() -> None:
        tasks = [asyncio.create_task(work()) for work in (forgetful, failing)]
        await asyncio.sleep(0)
        await asyncio.wait_for(cancel_all(tasks), 10)
        assert tasks[0].cancelled() and isinstance(tasks[1].exception(), ZeroDivisionError)
        await cancel_all([])

    asyncio.run(test())
