"""Decide whether an API key is accepted, and its owner (`name=`), limits, cache salt, priority and right to operate.

The file is read again when it changes, so that keys can be rotated without a restart. A line of it is
`KEY [name=… cache_group=… requests_per_minute=… tokens_per_minute=… tokens_per_day=… weight=… min_priority=…
operator=true]`; a line that starts with `#` is a comment.

Keys of different cache groups also get different salts for their block hashes, so that they do not share cached
prefixes (`--prefix-cache-sharing`). Otherwise the owner of one key could measure from its time to first token whether
the owner of another key has sent the same prompt.

`allowed` checks the priority that a request asks for against the limit of its key, and `check_operator` whether it may
change what all callers share.
"""

import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.router.protocol.caller import ANONYMOUS, Caller
from baton_serve.services.router.protocol.errors import PermissionDeniedError


def check_operator(caller: Caller, what: str) -> None:
    """Raise `PermissionDeniedError` unless the caller is an operator. `what` names the action for the error message; it
    would affect all callers.
    """
    if not caller.is_operator:
        raise PermissionDeniedError(
            f"this API key may not {what}, because it is one of several owners' keys: use one whose line in"
            " --api-key-file has operator=true"
        )


def allowed(requested: int | None, caller: Caller) -> int:
    """Return the priority that a request gets: the one that it asks for (`requested`), or the default if that is None.

    The default is 0, or the smallest value that the API key may ask for if that is larger. Raises
    `PermissionDeniedError` if `requested` is smaller than that value.
    """
    smallest = caller.min_priority
    if requested is None:
        return max(0, smallest or 0)
    if smallest is not None and requested < smallest:
        raise PermissionDeniedError(
            f"priority {requested} is below {smallest}, the smallest value that this API key may ask for: raise it or"
            " leave it out (operators: min_priority of the key's line in --api-key-file, or --min-priority)",
            param="priority",
        )
    return requested


logger = logging.getLogger(__name__)

RECHECK_S = 2.0
"""Smallest time between two checks whether the key file has changed, in seconds."""
CacheSharing = Literal["per-key", "all"]
"""Which callers share cached prefixes: those of one cache group, or all."""
_COUNTS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day")


@dataclass(frozen=True, slots=True)
class _Known:
    """An accepted API key, of which only the SHA-256 digest is kept, and its owner."""

    digest: bytes
    caller: Caller
    cache_group: str
    """Keys with the same value share cached prefixes."""


class ApiKeys:
    """Holds the accepted API keys of a router, and finds the owner of a key. The gateway asks it once per request, on
    the event loop.

    Without any key every client is accepted, and it may ask for any priority.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        *,
        file: str | None = None,
        defaults: Caller = ANONYMOUS,
        sharing: CacheSharing = "per-key",
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Accept the given keys and those in the key file, if one is given.

        `defaults` are the limits of a key whose line does not set its own. With `sharing` "per-key", callers of
        different cache groups get different salts, so that they do not share cached blocks. Without a monotonic `clock`
        the file is not checked for changes. Raises `ConfigurationError` if the file cannot be read, is malformed or
        holds no key.
        """
        self._fixed = [_known(key, defaults) for key in keys if key]
        self._file = Path(file) if file is not None else None
        self._defaults = defaults
        self._sharing = sharing
        self._anybody = replace(defaults, min_priority=None)
        self._clock = clock
        self._checked_at = clock() if clock is not None else 0.0
        # The stamp is taken before reading: a change between the two is then noticed at the next check.
        self._stamp = self._stamp_of_file()
        self._known = self._prepared(self._fixed + self._read())

    def caller(self, authorization: str | None) -> Caller | None:
        """Return the owner of the key in an Authorization header (`Bearer KEY`), or None if the request must be
        rejected.
        """
        if not self._known:
            return self._anybody
        self._check_file()
        scheme, _, key = (authorization or "").partition(" ")
        digest = sha256(key.strip().encode()).digest()
        # Every key is compared, in constant time and on digests of equal length. The response time thus reveals neither
        # a part of a key nor its position in the file.
        matches = [known.caller for known in self._known if hmac.compare_digest(digest, known.digest)]
        return matches[0] if matches and scheme.lower() == "bearer" else None

    def named(self, name: str) -> Caller | None:
        """Return the owner of this name, or None if no accepted key has such an owner. It is for work that outlives its
        request, such as a batch.
        """
        if not self._known:
            return self._anybody
        self._check_file()
        return next((known.caller for known in self._known if known.caller.name == name), None)

    def has_several_owners(self) -> bool:
        """Return whether the accepted keys belong to more than one owner."""
        # It is asked for every request, so it stops at the first two different names.
        return any(known.caller.name != self._known[0].caller.name for known in self._known)

    def _check_file(self) -> None:
        if self._file is None or self._clock is None or self._clock() - self._checked_at < RECHECK_S:
            return
        self._checked_at = self._clock()
        stamp = self._stamp_of_file()
        if stamp == self._stamp:
            return
        try:
            self._known = self._prepared(self._fixed + self._read())
        except ConfigurationError as exc:
            # The file may be half written. The previous keys are better than none, which would accept every client.
            logger.error("cannot reload the API keys, keeping the previous ones: %s", exc)  # noqa: TRY400 - no traceback
        else:
            logger.info("reloaded the API keys because their file changed", extra={"keys": len(self._known)})
        # Also after an error, or the same error would be logged every two seconds.
        self._stamp = stamp

    def _stamp_of_file(self) -> tuple[int, int, int] | None:
        """Return a value that is different after the key file was changed, or None if the file does not exist."""
        # The inode is part of it: Kubernetes updates a mounted Secret by a new link, whose time and size may be equal.
        if self._file is None:
            return None
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> list[_Known]:
        """Read all keys of the key file. Raises `ConfigurationError` if that fails or the file holds no key."""
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
            # An empty file would switch off the check of keys altogether, which nobody means by it.
            raise ConfigurationError(f"--api-key-file {self._file} holds no key: add one, or leave the flag out")
        return found

    def _prepared(self, known: list[_Known]) -> list[_Known]:
        """Return the keys with those fields set that depend on all keys together: their salts, and who is an
        operator.
        """
        if len({one.caller.name for one in known}) < 2:
            # Nobody else is harmed by what a single owner does.
            known = [replace(one, caller=replace(one.caller, is_operator=True)) for one in known]
        return self._salted(known)

    def _salted(self, known: list[_Known]) -> list[_Known]:
        """Return the keys with the salt of their cache group, if there are several groups whose cached blocks are to be
        kept apart.
        """
        if self._sharing == "all" or len({one.cache_group for one in known}) < 2:
            return known
        return [replace(one, caller=replace(one.caller, cache_salt=_salt_of(one.cache_group))) for one in known]


def _salt_of(cache_group: str) -> str:
    """Return the salt for a cache group: the same on every router and after restarts, and always of the same length."""
    # Cached blocks outlive routers, so the salt must not depend on a random value. The group of a key without a name
    # contains only the key's digest, so the key cannot be read from its salt.
    return sha256(b"baton-cache-group-1" + cache_group.encode()).hexdigest()[:32]


def _known(key: str, defaults: Caller, name: str = "", cache_group: str = "") -> _Known:
    digest = sha256(key.encode()).digest()
    # Keys of one name have one owner: they share their limits, and so their cached prefixes. The prefixes keep a key's
    # digest from being taken for a name.
    group = f"name:{cache_group or name}" if cache_group or name else f"key:{digest.hex()}"
    # A key without a name appears in logs and metrics under a part of its digest, from which it cannot be derived.
    return _Known(digest, replace(defaults, name=name or f"key-{digest.hex()[:8]}", is_operator=False), group)


def _parse_line(line: str, defaults: Caller, where: str) -> _Known:
    """Return the key and its owner from one line of the key file. Raises `ConfigurationError`, with `where` (file and
    line number) in its message, if the line is malformed.
    """
    key, *words = line.split()
    given = {name: value for name, _, value in (word.partition("=") for word in words)}
    if given.get("cache_group") == "":
        raise ConfigurationError(f"{where}: cache_group needs a name, as in cache_group=team-a")
    known = _known(key, defaults, given.pop("name", ""), given.pop("cache_group", ""))
    try:
        counts = {name: _count(given.pop(name)) for name in _COUNTS if name in given}
        weight = float(given.pop("weight", known.caller.weight))
        if not weight > 0:  # written like this to refuse NaN as well
            raise ValueError
        min_priority = int(given.pop("min_priority")) if "min_priority" in given else defaults.min_priority
        is_operator = {"true": True, "false": False}[given.pop("operator", "false")]
    except (ValueError, KeyError):
        raise ConfigurationError(
            f"{where}: limits and min_priority must be integers, limits 0 or more, weight a number above 0, and"
            " operator true or false"
        ) from None
    if given:
        known_words = ", ".join(("name", "cache_group", *_COUNTS, "weight", "min_priority", "operator"))
        raise ConfigurationError(f"{where}: unknown setting {next(iter(given))!r} (known: {known_words})")
    caller = replace(
        known.caller,
        weight=weight,
        min_priority=min_priority,
        is_operator=is_operator,
        requests_per_minute=counts.get("requests_per_minute", defaults.requests_per_minute),
        tokens_per_minute=counts.get("tokens_per_minute", defaults.tokens_per_minute),
        tokens_per_day=counts.get("tokens_per_day", defaults.tokens_per_day),
    )
    return replace(known, caller=caller)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value
