"""DSPy against a server: `python baton_serve/bench/clients/with_dspy.py http://127.0.0.1:8000/v1`."""

import json
import sys
from typing import Any, Literal

import dspy
from pydantic import BaseModel

QUESTION = "Tell me about the red radio."


class Radio(BaseModel):
    color: Literal["red", "blue"]
    rooms: Literal[1, 2, 3]


def main(url: str) -> None:
    common: dict[str, Any] = {"api_base": url, "api_key": "none", "cache": False}
    lm = dspy.LM("hosted_vllm/baton-demo", temperature=0, max_tokens=100, **common)
    (text,) = lm(QUESTION)
    (formed,) = lm(QUESTION, response_format=Radio)
    assert text and Radio.model_validate(json.loads(formed)), (text, formed)
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter(use_json_adapter_fallback=False), track_usage=True):
        # The demo model does not follow the adapter's format, whose error then quotes its answer.
        try:
            dspy.Predict("question -> answer")(question=QUESTION)
        except dspy.utils.exceptions.AdapterParseError as error:
            assert error.lm_response, error
    assert len(lm(QUESTION, n=2, temperature=1.0)) == 2
    usage = lm.history[0]["usage"]
    assert usage["completion_tokens"] > 0 and usage["prompt_tokens"] > 0, usage
    completing = dspy.LM("text-completion-openai/baton-demo", model_type="text", max_tokens=8, **common)
    assert completing("The red")[0]
    print(f"dspy: chat {text!r}, {formed} by a form, two answers, a completion")


if __name__ == "__main__":
    main(sys.argv[1])
