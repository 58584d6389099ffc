"""Decides the image tokens of PaliGemma 1 and 2, whose prompt tokens all attend to each other. All images have one
size, and all tokens of a prompt attend to each other in both directions.

transformers counts the positions of these models from 1. Rotary embeddings see differences of positions only, so that
Baton counts from 0 as everywhere.
"""

import msgspec

from baton_serve.contracts.vision.family import ImageFamily
from baton_serve.contracts.vision.media_text import Parts
from baton_serve.contracts.vision.model_files import ModelFacts

_MARK = "<image>"
"""The image token's text, which transformers' processor looks for."""

CHAT_TEMPLATE = (
    "{%- set found = namespace(image=false) -%}"
    "{%- for message in messages -%}{%- if message['content'] and message['content'] is not string -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}"
    "{%- set found.image = true -%}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
    "{%- if not found.image -%}{{ bos_token }}{%- endif -%}"
    "{%- for message in messages -%}{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- elif message['content'] -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}<image>{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if not found.image -%}{{ '\n' }}{%- endif -%}"
)
"""Writes the contents of all messages, one after another. A prompt without images gets the beginning and the end that
`PaliGemmaImages.framed` gives to others."""


class PaliGemmaImages(ImageFamily, frozen=True):
    """How PaliGemma models read images: the same number of tokens, without marks, stands for each image. The
    beginning-of-sequence token stands behind the last image, and a newline ends the prompt."""

    count: int
    begin: str

    @property
    def is_fixed(self) -> bool:
        """Return True: the number of tokens is the same for all images."""
        return True

    def parts(self, *, width: int, height: int) -> Parts:
        """Return what stands for an image of any size: a single number of image tokens, without text."""
        return (self.count,)

    def framed(self, text: str) -> str:
        """Return the text of a prompt with images as transformers' processor writes it."""
        before, mark, behind = text.rpartition(_MARK)
        return f"{before}{mark}{self.begin}{behind}\n"


class _Tower(msgspec.Struct, frozen=True):
    image_size: int = 224
    patch_size: int = 14


class _Config(msgspec.Struct, frozen=True):
    vision_config: _Tower = _Tower()
    image_token_id: int | None = None
    image_token_index: int = 256000


class _Images(msgspec.Struct, frozen=True):
    image_seq_length: int | None = None


def family(facts: ModelFacts) -> ImageFamily:
    """Return how a PaliGemma model whose files are `facts` reads images."""
    known, images = msgspec.convert(facts.config, _Config), msgspec.convert(facts.images, _Images)
    tower = known.vision_config
    return PaliGemmaImages(
        image_token_id=known.image_token_index if known.image_token_id is None else known.image_token_id,
        # Each patch has one token. The processor states the same number.
        count=images.image_seq_length or (tower.image_size // tower.patch_size) ** 2,
        attends_both_ways=True,
        chat_template=CHAT_TEMPLATE,
        begin=facts.token_text("bos_token") or "<bos>",
    )
