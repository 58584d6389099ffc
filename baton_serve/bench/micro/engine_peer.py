"""transformers' own continuous batching, with made-up weights of the same shape, on the same device: a peer in one run.

Its step is not visible from outside. So the same prompts are answered with one token and with several: the first tells
prefill, the difference divided by the further tokens tells a decode step. Prompts must differ from call to call only
where its prefix cache is on, which is not the default.
"""

import gc
import time
from pathlib import Path
from typing import Any

import torch

NAME = "transformers continuous batching"


class TransformersPeer:
    """`attention` is transformers' name; `flash_attention_3` and others need packages of their own."""

    def __init__(self, folder: Path, target: torch.device, attention: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM  # seconds that only this peer should cost

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device(target):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        self._model: Any = model.eval()

    def decode_s(self, prompts: list[list[int]], tokens: int) -> float:
        """Seconds of one decode step of this batch."""
        self._answer(prompts, 1 + tokens)  # its cache is sized and its graphs are captured for the first batch
        first = self._answer(prompts, 1)
        whole = self._answer(prompts, 1 + tokens)
        self._model.destroy_cached_continuous_batching_manager()
        return (whole - first) / tokens

    def prefill_s(self, prompts: list[list[int]]) -> float:
        """Seconds until all prompts have their first token."""
        self._answer(prompts, 1)
        elapsed = self._answer(prompts, 1)
        self._model.destroy_cached_continuous_batching_manager()
        return elapsed

    def close(self) -> None:
        del self._model
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def _answer(self, prompts: list[list[int]], tokens: int) -> float:
        from transformers import GenerationConfig

        wanted = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        started = time.perf_counter()
        answers = self._model.generate_batch(
            prompts, wanted, max_new_tokens=tokens, progress_bar=False, persistent_manager=True
        )
        elapsed = time.perf_counter() - started
        made = sum(len(answer.generated_tokens) for answer in answers.values())
        if made != tokens * len(prompts):
            raise RuntimeError(f"{NAME} made {made} tokens of {tokens * len(prompts)}")
        return elapsed
