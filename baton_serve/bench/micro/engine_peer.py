"""A peer of `baton-bench engine`: transformers' continuous batching with random weights of the same shape, on the same
device.

Its steps cannot be observed from outside. So the same prompts are answered with one token and with several: the first
call measures prefill, the difference divided by the further tokens measures a decode step. The prompts may repeat,
because its prefix cache is off by default.
"""

import gc
import time
from pathlib import Path
from typing import Any

import torch

NAME = "transformers continuous batching"


class TransformersPeer:
    """The peer. `attention` is the name in transformers; `flash_attention_3` and others need packages of their own."""

    def __init__(self, folder: Path, target: torch.device, attention: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM  # slow import, only for this peer

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device(target):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
        self._model: Any = model.eval()

    def decode_s(self, prompts: list[list[int]], tokens: int) -> float:
        """Return the seconds of one decode step of this batch."""
        self._answer(prompts, 1 + tokens)  # warm up: sizes the cache, captures graphs
        first = self._answer(prompts, 1)
        whole = self._answer(prompts, 1 + tokens)
        self._model.destroy_cached_continuous_batching_manager()
        return (whole - first) / tokens

    def prefill_s(self, prompts: list[list[int]]) -> float:
        """Return the seconds until all prompts have their first token."""
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
        """Return the seconds to generate `tokens` tokens for each prompt. Raises `RuntimeError` if the number of
        tokens differs."""
        from transformers import GenerationConfig

        # No token has the ID -1, so that answers have exactly the requested length.
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
