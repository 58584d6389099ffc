"""Generate answers for many prompts in one process, without a server: `python examples/offline_batch.py MODEL`."""

import sys

from baton_serve import LLM, SamplingParams

PROMPTS = [f"What is {a} plus {b}?" for a in range(1, 4) for b in range(1, 4)]

if __name__ == "__main__":
    with LLM(sys.argv[1]) as llm:
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        for prompt, output in zip(
            PROMPTS, llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=24)), strict=True
        ):
            print(f"{prompt}  {output.outputs[0].text.strip()}")
