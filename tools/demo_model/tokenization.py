"""The byte-level BPE tokenizer, its chat template, and a fast encoder that caches words and gives the same tokens.
Independent of the model.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
FORCED = "forced"
"""Role of an answer whose form a grammar demands. It is rendered as the assistant's."""
SPECIAL = (PAD, BEGIN, END, *ROLES.values())
CHAT_TEMPLATE = (
    "{%- macro shown(content) %}"
    "{%- if content is string %}{{- content }}"
    "{%- elif content %}"
    "{%- for part in content if part['type'] == 'text' %}{{- part['text'] }}{%- endfor %}"
    "{%- endif %}"
    "{%- endmacro %}"
    "{%- macro offered() %}"
    "{{- 'You can call these functions:\\n<tools>' }}"
    "{%- for tool in tools %}"
    "{{- '\\n{\"name\": ' + (tool['function']['name'] | tojson) }}"
    "{%- for key in ['description', 'parameters'] if tool['function'][key] %}"
    "{{- ', \"' + key + '\": ' + (tool['function'][key] | tojson) }}"
    "{%- endfor %}{{- '}' }}"
    "{%- endfor %}{{- '\\n</tools>' }}"
    "{%- endmacro %}"
    "{{- '<|begin|>' }}"
    "{%- if tools and (not messages or messages[0]['role'] not in ['system', 'developer']) %}"
    "{{- '<|system|>' + offered() + '<|end|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}{{- '<|assistant|>' }}"
    "{%- elif message['role'] in ['system', 'developer'] %}{{- '<|system|>' }}"
    "{%- else %}{{- '<|user|>' }}{%- endif %}"
    "{%- if message['role'] == 'tool' %}"
    "{{- '<tool_response>\\n' + shown(message['content']) + '\\n</tool_response>' }}"
    "{%- else %}{{- shown(message['content']) }}{%- endif %}"
    "{%- if loop.first and tools and message['role'] in ['system', 'developer'] %}"
    "{{- '\\n\\n' + offered() }}{%- endif %}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '' if loop.first and not message['content'] else '\\n' }}"
    "{{- '<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' }}"
    "{{- call['function']['arguments'] if call['function']['arguments'] is string "
    "else call['function']['arguments'] | tojson }}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
# The pattern of GPT-2 by which the byte-level pre-tokenizer splits words, applied between digits, each of which is a
# word: needed to cache words.
_WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+|\s+(?![^\s\d])|\s+")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train the tokenizer. Digits are always single tokens, so that the model copies a code digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Write the tokenizer's files to a model folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class Encoder(Protocol):
    """The interface of a tokenizer that the corpus needs."""

    ids: dict[str, int]  # of the special tokens

    def encode(self, text: str) -> list[int]: ...
    def measure(self, text: str) -> int: ...


class WordEncoder:
    """Encodes as the tokenizer does, without special tokens. It caches words, because BPE never merges across words."""

    def __init__(self, tokenizer: Tokenizer, *, max_words: int = 200_000) -> None:
        self._tokenizer = tokenizer
        self._words: dict[str, list[int]] = {}
        self._max_words = max_words
        self.ids: dict[str, int] = {token: _id_of(tokenizer, token) for token in SPECIAL}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        words = self._words
        for word in _WORD.findall(text):
            ids += words.get(word) or self._encode_word(word)
        return ids

    def measure(self, text: str) -> int:
        return len(self.encode(text))

    def _encode_word(self, word: str) -> list[int]:
        if len(self._words) >= self._max_words:
            self._words.clear()
        ids: list[int] = self._tokenizer.encode(word, add_special_tokens=False).ids
        self._words[word] = ids
        return ids


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token}")
    return int(number)
