"""The model of `make demo-vision` reads fresh pictures, and through a cluster it answers as with transformers."""

import asyncio

import pytest

from tests.e2e.in_process import served
from tests.e2e.test_families import until_ready
from tools.vision_demo.demo import MODEL, chat_body, demo_questions
from tools.vision_demo.evaluation import VisionJudge, fresh_questions
from tools.vision_demo.pictures import NO_PICTURE

pytestmark = pytest.mark.slow

MAX_BYTES = 2_000_000
"""Bound of what the model adds to the repository."""


@pytest.fixture(scope="module")
def judge() -> VisionJudge:
    return VisionJudge(MODEL)


def test_most_fresh_questions_are_answered_rightly(judge: VisionJudge) -> None:
    wrong = judge.wrong(fresh_questions("tests", 100))
    assert len(wrong) <= 5, wrong


def test_the_cluster_answers_the_questions_of_the_demo_rightly_and_as_transformers(judge: VisionJudge) -> None:
    asked = demo_questions()

    async def ask() -> list[str]:
        async with asyncio.timeout(60), served(MODEL, transport="usm") as client:
            await until_ready(client)
            answers = [await client.post("/v1/chat/completions", json=chat_body(question)) for question in asked]
            return [answer.json()["choices"][0]["message"]["content"] for answer in answers]

    said = asyncio.run(ask())
    assert said == judge.reply(asked) == [question.answer for question in asked]
    # Pictures that do not arrive change the answer: the demo shows it.
    lost = [body["messages"][0]["content"] for body in map(chat_body, asked)]
    assert len(lost[0]) == 2 and len(lost[-1]) == 1 and said[-1] == NO_PICTURE


def test_the_model_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_BYTES
