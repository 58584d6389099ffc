"""Brings the words of a command line into the form that argparse knows: dashes in flags, and JSON in one piece.

`--compilation-config.cudagraph_mode NONE` is vLLM's way to set one key of a JSON object without JSON in a shell.
"""

import json
from collections.abc import Mapping, Sequence


def prepared(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line with dashes instead of underscores in flags. Flags that set single keys of one
    JSON object (`--flag.key value`) are joined into one word (`--flag={…}`).

    Raises `ValueError` with a text for the user if such a flag has no value.
    """
    words: list[str] = []
    objects: dict[str, dict[str, object]] = {}
    waiting = iter(_dashed(word) for word in argv)
    for word in waiting:
        flag, equals, value = word.partition("=")
        name, dot, path = flag.partition(".")
        # `-1.5` is a number, not a flag with a key.
        if not (dot and path and name.startswith("-") and not name.lstrip("-").replace(".", "").isdigit()):
            words.append(word)
            continue
        given = value if equals else next(waiting, None)
        if given is None:
            raise ValueError(f"{flag}: expected one argument")
        _put(objects.setdefault(name, {}), path.split("."), _parsed(given))
    for name, joined in objects.items():
        _take_whole(words, name, joined)
        words.append(f"{name}={json.dumps(joined)}")
    return words


def flag_words(name: str, value: object) -> list[str]:
    """Return the command-line words for a key of a configuration file and its value, such as `--disable-log-requests`
    for a value of True.
    """
    flag = "--" + name.replace("_", "-")
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            return ["--no-" + flag.removeprefix("--")]
        case list():
            return [f"{flag}={item}" for item in value]
        case Mapping():
            return [f"{flag}={json.dumps(value)}"]
        case _:
            return [f"{flag}={value}"]


def _dashed(word: str) -> str:
    """Return `word` with dashes instead of underscores in the name of its flag: `--max_model_len=4` becomes
    `--max-model-len=4`. Underscores stay in the value and in keys after a dot.
    """
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    name, dot, path = flag.partition(".")
    return name.replace("_", "-") + dot + path + equals + value


def _take_whole(words: list[str], name: str, joined: dict[str, object]) -> None:
    """Remove the words `NAME JSON` and `NAME=JSON` of the flag `name` from `words`. Add the keys of that object to
    `joined`; keys that `joined` has already keep their values.
    """
    # Backwards, so that a removed word does not move the words before it.
    for at, word in reversed(list(enumerate(words))):
        flag, equals, value = word.partition("=")
        if flag != name or not (equals or at + 1 < len(words)):
            continue
        whole = _parsed(value if equals else words[at + 1])
        if isinstance(whole, dict):
            del words[at : at + (1 if equals else 2)]
            joined |= {key: item for key, item in whole.items() if key not in joined}


def _put(target: dict[str, object], path: Sequence[str], value: object) -> None:
    for key in path[:-1]:
        inner = target.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{'.'.join(path)}: {key} is set to {inner} already, so it cannot have keys")
        target = inner
    target[path[-1]] = value


def _parsed(text: str) -> object:
    """Return the JSON value of a text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
