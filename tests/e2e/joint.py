"""Sends a prompt to two prefill instances that read it together, as a router does: a front and what follows it, or
parts that the two compute in turns."""

from itertools import pairwise

import msgspec

from contracts.identity import RequestId
from contracts.messages import Cancel, Decode, Front, Prefill, Work
from contracts.sampling import SamplingParams
from tests.e2e.instances import Answer, Driver, Instance

BLOCK = 16
OWN = {"prefill-0": (), "prefill-1": (), "decode-0": ()}
FLAGS = ("--block-size", str(BLOCK), "--kv-tail-parts", "4", "--max-num-batched-tokens", "64")


class Joint:
    """`readers` take turns; the last part is always the second's. A decode instance writes on."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.readers = [driver.instances["prefill-0"], driver.instances["prefill-1"]]

    @property
    def front(self) -> Instance:
        return self.readers[0]

    @property
    def back(self) -> Instance:
        return self.readers[1]

    def start(
        self,
        work: Work,
        *ends: int,
        never_told: int | None = None,
        brings_all: bool = False,
        timeout_s: float = 20.0,
    ) -> Answer:
        """`ends`: of each part but the last, in blocks. Of `never_told`, the number of a part, nobody is told.
        `brings_all`: each part has all tokens up to its end. `timeout_s`: of what one reader fetches from the other.
        """
        driver = self.driver
        works = [*(part_of(work, number, end) for number, end in enumerate(ends)), work]
        readers = [self.readers[(len(ends) + 1 - number) % 2] for number in range(len(works))]
        tickets = [driver.ticket(timeout_s, source=source, sink=sink) for source, sink in pairwise(readers)]
        tickets.append(driver.ticket(source=self.back))
        for number, (part, reader) in enumerate(zip(works, readers, strict=True)):
            front = None
            if number:
                front = Front(ticket=tickets[number - 1], num_blocks=ends[number - 1])
            if front is not None and number > 1:
                known = 0 if brings_all else len(works[number - 2].token_ids)
                front = msgspec.structs.replace(front, after=works[number - 2].request_id, known_tokens=known)
                part = msgspec.structs.replace(part, token_ids=part.token_ids[known:])
            if number != never_told:
                driver.send(reader, Prefill(part, tickets[number], None, front))
        driver.send(driver.decode, Decode(work, tickets[-1]))
        return driver.answers[work.request_id]

    async def answer(self, answer: Answer) -> list[int]:
        await self.driver.until(lambda: bool(answer.reasons) or bool(answer.failed), "an answer")
        await self.driver.until(lambda: answer.has_begun([0]) and answer.prefill is not None, "its beginning")
        assert not answer.failed
        return answer.sequence()

    def cancel(self, work: Work, num_parts: int) -> None:
        """Everywhere, all of it."""
        ids = [work.request_id, *(part_id(work, number) for number in range(num_parts - 1))]
        for instance in self.driver.instances.values():
            for request_id in ids:
                self.driver.send(instance, Cancel(request_id))


def part_id(work: Work, number: int) -> RequestId:
    return RequestId(f"{work.request_id}^{number}")


def part_of(work: Work, number: int, end: int) -> Work:
    """The first `end` blocks."""
    tokens = work.token_ids[: end * BLOCK]
    return msgspec.structs.replace(
        work,
        request_id=part_id(work, number),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(seed=0, max_tokens=1, temperature=0.0),
        sequences=[0],
    )
