"""API keys, their owners and limits. The file is read again when it changes, so keys rotate without a restart.

A line of the file is `KEY [name=… requests_per_minute=… tokens_per_minute=… tokens_per_day=… weight=…
min_priority=…]`; `#` begins a comment. Keys are kept as digests and compared in constant time, always all of them.
"""

import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.router.protocol.caller import ANONYMOUS, Caller

logger = logging.getLogger(__name__)

RECHECK_S = 2.0
_COUNTS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day")


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    caller: Caller


class ApiKeys:
    """Without any key nobody is refused, and any priority may be asked for. `defaults` are the limits of keys whose
    line says nothing of them."""

    def __init__(
        self,
        keys: Sequence[str] = (),
        *,
        file: str | None = None,
        defaults: Caller = ANONYMOUS,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Raises `ConfigurationError` for a file that cannot be read or holds no key."""
        self._fixed = [_known(key, defaults) for key in keys if key]
        self._file = Path(file) if file is not None else None
        self._defaults = defaults
        self._anybody = replace(defaults, min_priority=None)
        self._clock = clock
        self._checked_at = clock() if clock is not None else 0.0
        self._stamp = self._stamp_of_file()
        self._known = self._fixed + self._read()

    def caller(self, authorization: str | None) -> Caller | None:
        """None: refused."""
        if not self._known:
            return self._anybody
        self._check_file()
        scheme, _, key = (authorization or "").partition(" ")
        digest = sha256(key.strip().encode()).digest()
        matches = [known.caller for known in self._known if hmac.compare_digest(digest, known.digest)]
        return matches[0] if matches and scheme.lower() == "bearer" else None

    def _check_file(self) -> None:
        if self._file is None or self._clock is None or self._clock() - self._checked_at < RECHECK_S:
            return
        self._checked_at = self._clock()
        stamp = self._stamp_of_file()
        if stamp == self._stamp:
            return
        try:
            self._known = self._fixed + self._read()
        except ConfigurationError as exc:
            logger.error("the keys stay as they were: %s", exc)  # noqa: TRY400 - one line says it
        else:
            logger.info("keys read again", extra={"keys": len(self._known)})
        self._stamp = stamp

    def _stamp_of_file(self) -> tuple[int, int, int] | None:
        """Changes with the file; a mounted Secret changes by a new link."""
        if self._file is None:
            return None
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> list[_Known]:
        if self._file is None:
            return []
        try:
            lines = self._file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigurationError(f"--api-key-file {self._file}: {getattr(exc, 'strerror', None) or exc}") from exc
        found = [
            _parse_line(line, self._defaults, f"--api-key-file {self._file}: line {number}")
            for number, line in enumerate(lines, 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not found:
            raise ConfigurationError(f"--api-key-file {self._file} holds no key")
        return found


def _known(key: str, defaults: Caller, name: str = "") -> _Known:
    digest = sha256(key.encode()).digest()
    return _Known(digest, replace(defaults, name=name or f"key-{digest.hex()[:8]}"))


def _parse_line(line: str, defaults: Caller, where: str) -> _Known:
    key, *words = line.split()
    given = {name: value for name, _, value in (word.partition("=") for word in words)}
    known = _known(key, defaults, given.pop("name", ""))
    try:
        counts = {name: _count(given.pop(name)) for name in _COUNTS if name in given}
        weight = float(given.pop("weight", known.caller.weight))
        if not weight > 0:
            raise ValueError
        min_priority = int(given.pop("min_priority")) if "min_priority" in given else defaults.min_priority
    except ValueError:
        raise ConfigurationError(
            f"{where}: limits and a least priority are whole numbers, and a weight is above 0"
        ) from None
    if given:
        known_words = ", ".join(("name", *_COUNTS, "weight", "min_priority"))
        raise ConfigurationError(f"{where}: unknown {next(iter(given))} (known: {known_words})")
    caller = replace(
        known.caller,
        weight=weight,
        min_priority=min_priority,
        requests_per_minute=counts.get("requests_per_minute", defaults.requests_per_minute),
        tokens_per_minute=counts.get("tokens_per_minute", defaults.tokens_per_minute),
        tokens_per_day=counts.get("tokens_per_day", defaults.tokens_per_day),
    )
    return _Known(known.digest, caller)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value
