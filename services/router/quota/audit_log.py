"""Write the audit log (`--audit-log`): one JSON line per request with caller, path and status, never its content.

The file may be moved away for rotation; the next line creates it again.
"""

import logging
from logging.handlers import WatchedFileHandler

from baton_serve.services.common.errors import ConfigurationError
from baton_serve.services.common.logs import JsonFormatter


class AuditLog:
    """Writes one line for each request to the audit log of a router. The gateway owns it and calls it once per
    request.
    """

    def __init__(self, path: str) -> None:
        """Open the file at `path` for appending. Raises `ConfigurationError` if that fails."""
        try:
            self._handler = WatchedFileHandler(path, encoding="utf-8")
        except OSError as exc:
            raise ConfigurationError(f"--audit-log {path}: {exc.strerror}") from exc
        self._handler.setFormatter(JsonFormatter())
        # Not `getLogger`: the audit lines must not reach the process's own log, nor be filtered by its level.
        self._logger = logging.Logger("audit", logging.INFO)
        self._logger.addHandler(self._handler)

    def request(self, *, request_id: str, client: str, caller: str | None, method: str, path: str, status: int) -> None:
        """Write the line of one request to the audit log.

        `caller` is None if the request had no valid API key. `status` is 0 if the client left before an answer began.
        """
        extra = {"request_id": request_id, "client": client, "caller": caller}
        self._logger.info("request", extra={**extra, "method": method, "path": path, "status": status})

    def close(self) -> None:
        """Close the file of the audit log."""
        self._handler.close()
