"""Instructor against a server: `python baton_serve/bench/clients/with_instructor.py http://127.0.0.1:8000/v1`."""

import sys
from typing import Any, Literal

import instructor
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "Tell me about the red radio."}]
MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


class Radio(BaseModel):
    color: Literal["red", "blue"]
    rooms: Literal[1, 2, 3]


def main(url: str) -> None:
    common: dict[str, Any] = {
        "model": "baton-demo",
        "messages": QUESTION,
        "response_model": Radio,
        "temperature": 0,
        "max_tokens": 100,
    }
    for mode in MODES:
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        found, answer = client.create_with_completion(**common)
        assert answer.usage.completion_tokens > 0
        parts = list(client.create_partial(**common))
        assert len(parts) > 2 and parts[-1].model_dump() == found.model_dump(), (mode, parts[-1], found)
        print(f"instructor, {mode.name}: {found!r}, streamed alike in {len(parts)} parts")
    several = next(iter(client.create_iterable(**{**common, "max_tokens": 300})))
    assert isinstance(several, Radio)
    # The demo model does not follow a schema that is only described, so the answer is asked for again, and given up.
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=instructor.Mode.MD_JSON)
    try:
        client.create(**common, max_retries=2)
    except InstructorRetryException as error:
        assert error.n_attempts >= 2 and error.total_usage.completion_tokens > 0, error
    else:
        raise AssertionError("the demo model answered with JSON without a grammar")
    print("instructor: first of several, and retries of a form that was not kept")


if __name__ == "__main__":
    main(sys.argv[1])
