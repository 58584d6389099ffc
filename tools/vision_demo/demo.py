"""`make demo-vision`: draws pictures, sends them to a local cluster and prints what it reads in them.

transformers reads these pictures rightly with this model, so a wrong answer means that a picture was lost, damaged or
taken for another one on its way through router, prefill and decode.
"""

import base64
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec

from baton_serve.services.local.demo import time_split_text
from baton_serve.services.local.demo_client import DemoUsage, TimeSplit
from baton_serve.services.local.serve_process import LocalCluster
from tools.vision_demo.pictures import (
    NO_PICTURE,
    NUMBER_QUESTIONS,
    VisualQuestion,
    make_picture,
)

MODEL = Path(__file__).parent / "model"
SEEDS = range(4)
"""Seeds of the pictures; a test says that transformers reads them rightly with this model."""


def demo_questions() -> list[VisualQuestion]:
    """Return what the demo asks: the number of each picture in the same words, so that a picture which is taken for
    another one gives a wrong answer; then a picture that the cluster has seen, and a question without a picture.
    """
    pictures = [make_picture(Random(f"demo/{seed}")) for seed in SEEDS]
    asked = [VisualQuestion(one, NUMBER_QUESTIONS[0], f"The number is {one.number}.") for one in pictures]
    return [*asked, asked[0], VisualQuestion(None, NUMBER_QUESTIONS[0], NO_PICTURE)]


def chat_body(question: VisualQuestion) -> dict[str, Any]:
    """Return the question with its picture, as a body of OpenAI's chat completions."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": question.text}]
    if question.picture is not None:
        url = "data:image/png;base64," + base64.b64encode(question.picture.png()).decode()
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 20, "temperature": 0}


def ask(client: httpx.Client, question: VisualQuestion) -> bool:
    """Send a question, print the answer and where its time went, and return whether it is right."""
    seen = question.picture
    print(f"> {f'[a picture of {seen.number} in {seen.colour}] ' if seen else ''}{question.text}", flush=True)
    answer = client.post("/v1/chat/completions", json=chat_body(question), headers={"x-baton-explain": "1"})
    answer.raise_for_status()
    body = answer.json()
    said = body["choices"][0]["message"]["content"]
    is_right = bool(said == question.answer)
    print(f"{said}   ({'correct' if is_right else f'WRONG: the correct answer is {question.answer!r}'})")
    split, usage = msgspec.convert(body["baton"], TimeSplit), msgspec.convert(body["usage"], DemoUsage)
    print(time_split_text(split, usage) + "\n", flush=True)
    return is_right


def run_demo(url: str, asked: Sequence[VisualQuestion]) -> int:
    """Ask the router at `url` these questions and return the number of wrong answers."""
    with httpx.Client(base_url=url, timeout=120.0) as client:
        return sum(not ask(client, question) for question in asked)


def main() -> int:
    """Start a cluster, ask, stop it, and return 1 if an answer was wrong."""
    print("Starting a router, a prefill worker and a decode worker with a model that reads pictures ...", flush=True)
    # Without a least length every prompt is handed off: a picture is only 64 tokens of this model.
    options = [str(MODEL), "--served-model-name=baton-vision", "--disaggregation-min-tokens=0"]
    with LocalCluster(options) as cluster:
        print(f"ready at {cluster.url}/v1\n", flush=True)
        num_wrong = run_demo(cluster.url, demo_questions())
    print(f"{num_wrong} answers were wrong." if num_wrong else "All answers were correct.")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
