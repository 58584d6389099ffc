"""Fresh questions about pictures, answered by `transformers.generate` from a saved folder."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

from tools.vision_demo.network import IMAGE, NUM_PATCHES
from tools.vision_demo.pictures import VisualQuestion, make_question


def fresh_questions(seed: str, count: int) -> list[VisualQuestion]:
    """Return questions from a random stream that training does not use."""
    rng = Random(f"fresh/{seed}")
    return [make_question(rng) for _ in range(count)]


class VisionJudge:
    """Answers with transformers in float32, greedily, through the chat template and the image processor of a folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self._model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def reply(self, asked: Sequence[VisualQuestion], *, batch: int = 50) -> list[str]:
        """Return the answers without the end token."""
        parts = [asked[start : start + batch] for start in range(0, len(asked), batch)]
        return [text for part in parts for text in self._reply(part)]

    def wrong(self, asked: Sequence[VisualQuestion]) -> list[tuple[VisualQuestion, str]]:
        """Return the questions whose answers are not exactly right, with those answers."""
        pairs = zip(asked, self.reply(asked), strict=True)
        return [(question, said) for question, said in pairs if said != question.answer]

    def _reply(self, asked: Sequence[VisualQuestion]) -> list[str]:
        chats = []
        for question in asked:
            parts = [{"type": "image"}] if question.picture else []
            chats.append([{"role": "user", "content": [*parts, {"type": "text", "text": question.text}]}])
        texts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        texts = [text.replace(IMAGE, IMAGE * NUM_PATCHES) for text in texts]
        inputs = self.tokenizer(texts, add_special_tokens=False, return_tensors="pt", padding=True)
        shown = [Image.open(BytesIO(question.picture.png())) for question in asked if question.picture]
        pixels = self._processor(images=shown, return_tensors="pt")["pixel_values"] if shown else None
        with torch.no_grad():
            ids = self._model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                pixel_values=pixels,
                do_sample=False,
                max_new_tokens=20,
            )
        said: list[str] = self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return said
