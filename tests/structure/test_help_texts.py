"""The texts of `--help` are for users: they explain every flag, without the words of the code."""

import re

import msgspec
import pytest

from baton_serve.services.common.settings.options import Option, options_of
from baton_serve.services.doctor.settings import DoctorSettings
from baton_serve.services.instance.settings import InstanceSettings
from baton_serve.services.local.settings import ServeSettings
from baton_serve.services.router.settings import RouterSettings

SETTINGS: tuple[type[msgspec.Struct], ...] = (DoctorSettings, InstanceSettings, RouterSettings, ServeSettings)
WORDS_OF_THE_CODE = re.compile(
    r"\b(exposed|tail|parcels?|rungs?|ladder|tombstones?|tickets?|twins?|dialects?|attempts?|generation number)\b"
)
MAX_CHARACTERS = 460
"""The text of --kv-transport, which explains five transports. At a width of 110 these are six lines."""
HARD = {
    "core_turns": "take turns",
    "engine_nice": "lowest priority",
    "kv_tail_parts": "groups of layers",
    "max_cpu_loras": "device memory",
    "max_num_seqs": "largest batch",
    "first_token_hold": "ITL SLO",
}
"""Flags that readers had to read twice, each with words that its text needs to be understood."""


def options() -> list[Option]:
    return [option for settings in SETTINGS for option in options_of(settings)]


def test_each_flag_has_a_text_of_readable_length_without_words_of_the_code() -> None:
    found = [
        option.flag
        for option in options()
        if not 10 <= len(option.description) <= MAX_CHARACTERS or WORDS_OF_THE_CODE.search(option.description)
    ]
    assert found == []


@pytest.mark.parametrize("name", HARD)
def test_the_text_of_a_hard_flag_says_what_it_does_and_when_to_change_it(name: str) -> None:
    (text,) = {option.description for option in options() if option.name == name}
    assert HARD[name] in text
    assert re.search(r"\b(raise|lower|lowered|baton serve sets|baton serve does|gives)\b", text, re.IGNORECASE)
