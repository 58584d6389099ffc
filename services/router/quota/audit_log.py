"""Who asked what, and whether it was allowed: one JSON line a request in a file of its own. Never what was said.

The file may be moved away: the next line begins a new one.
"""

import logging
from logging.handlers import WatchedFileHandler

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.logs import JsonFormatter


class AuditLog:
    def __init__(self, path: str) -> None:
        """Raises `ConfigurationError`."""
        try:
            self._handler = WatchedFileHandler(path, encoding="utf-8")
        except OSError as exc:
            raise ConfigurationError(f"--audit-log {path}: {exc.strerror}") from exc
        self._handler.setFormatter(JsonFormatter())
        self._logger = logging.Logger("audit", logging.INFO)
        self._logger.addHandler(self._handler)

    def request(self, *, request_id: str, client: str, caller: str | None, method: str, path: str, status: int) -> None:
        """`caller` None: it had no valid key. `status` 0: the client went away before an answer began."""
        extra = {"request_id": request_id, "client": client, "caller": caller}
        self._logger.info("request", extra={**extra, "method": method, "path": path, "status": status})

    def close(self) -> None:
        self._handler.close()
