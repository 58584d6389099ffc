"""Whom to ask which instances there are, and how an instance is asked to drain. HTTP and the registry, no policy."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import httpx
import msgspec

from baton_serve.contracts.instance import Role
from baton_serve.services.common.cluster_key import ClusterKey
from baton_serve.services.common.errors import RemoteError
from baton_serve.services.common.registry import RegistryView

T = TypeVar("T")

TIMEOUT_S = 10.0


class AdminRequestError(RemoteError):
    """A router or an instance did not answer, or refused."""


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that the cluster knows now."""

    instance: str
    generation: int
    role: Role
    http_address: str
    draining: bool


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """Of an instance's own /health."""

    status: str
    generation: int
    routers: int
    requests: int


class InstanceSource(Protocol):
    async def instances(self) -> list[InstanceInfo]:
        """Raises `AdminRequestError`."""


class _RouterHealth(msgspec.Struct, frozen=True):
    instances: list[InstanceInfo]


class RouterSource:
    """A router's /health names the instances that are ready, and those that drain."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url.rstrip("/")

    async def instances(self) -> list[InstanceInfo]:
        answer = await _request(self._client, "GET", f"{self._url}/health")
        return _decoded(answer, _RouterHealth).instances


class RegistrySource:
    """The records of a registry outside the routers; `view` has been started."""

    def __init__(self, view: RegistryView) -> None:
        self._view = view

    async def instances(self) -> list[InstanceInfo]:
        if not self._view.is_connected():
            raise AdminRequestError("the registry does not answer")
        return [
            InstanceInfo(
                instance=record.instance,
                generation=record.generation,
                role=record.role,
                http_address=record.http_address,
                draining=record.draining,
            )
            for record in self._view.records()
        ]


class InstanceAdmin:
    """Speaks to instances themselves."""

    def __init__(self, client: httpx.AsyncClient, key: ClusterKey | None) -> None:
        self._client = client
        self._headers = {"authorization": f"Bearer {key.admin_token}"} if key is not None else {}

    async def drain(self, address: str, *, exit_afterwards: bool) -> None:
        """Returns when it refuses new work. Raises `AdminRequestError`."""
        url = f"http://{address}/admin/drain?exit={int(exit_afterwards)}"
        answer = await _request(self._client, "POST", url, headers=self._headers)
        if answer.status_code != 202:
            raise AdminRequestError(f"{address} refuses to drain: {answer.status_code} {answer.text}")

    async def state(self, address: str) -> InstanceState | None:
        """None when nobody answers there."""
        try:
            answer = await self._client.get(f"http://{address}/health")
        except httpx.TransportError:
            return None
        return _decoded(answer, InstanceState)


def active_instances(seen: Sequence[InstanceInfo], role: Role) -> list[InstanceInfo]:
    """Those of a role that take work."""
    return [one for one in seen if one.role == role and not one.draining]


async def _request(
    client: httpx.AsyncClient, method: str, url: str, *, headers: dict[str, str] | None = None
) -> httpx.Response:
    try:
        return await client.request(method, url, headers=headers)
    except (httpx.TransportError, httpx.InvalidURL) as exc:
        raise AdminRequestError(f"{url} does not answer: {exc or type(exc).__name__}") from exc


def _decoded(answer: httpx.Response, expected: type[T]) -> T:
    try:
        return msgspec.json.decode(answer.content, type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise AdminRequestError(f"{answer.url} is no Baton process: {exc}") from exc
