"""Lists the instances of a cluster, from a router or from the registry, and sends drain requests to instances.

`drain` and `rotation` decide what to do with them.
"""

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
"""Longest time for one HTTP request to a router or an instance."""


class AdminRequestError(RemoteError):
    """A router, an instance or the registry did not answer, or refused a request of `baton drain` or `baton rotate`."""


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One instance as the router or the registry lists it. `generation` changes with each restart of its process."""

    instance: str
    generation: int
    role: Role
    http_address: str
    draining: bool


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an instance's own /health that `baton rotate` needs. `routers` is the number of connected routers,
    and `requests` the number of running requests.
    """

    status: str
    generation: int
    routers: int
    requests: int


class InstanceSource(Protocol):
    """The interface that lists the instances of the cluster: `RouterSource` or `RegistrySource`."""

    async def instances(self) -> list[InstanceInfo]:
        """Return all instances of the cluster. Raises `AdminRequestError` if the router or registry does not answer."""


class _RouterHealth(msgspec.Struct, frozen=True):
    """The part of the router's /health that lists instances."""

    instances: list[InstanceInfo] | None = None
    """The list is None if the router has API keys and the request had none of them."""


class RouterSource:
    """Lists the instances of the cluster from a router's /health, which has ready and draining ones."""

    def __init__(self, client: httpx.AsyncClient, url: str, api_key: str | None = None) -> None:
        self._client = client
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key is not None else {}

    async def instances(self) -> list[InstanceInfo]:
        answer = await _request(self._client, "GET", f"{self._url}/health", headers=self._headers)
        instances = _decoded(answer, _RouterHealth).instances
        if instances is None:
            raise AdminRequestError(
                f"{self._url} lists its instances only to clients with an API key: give a valid one as --api-key, or"
                " the registry as --registry"
            )
        return instances


class RegistrySource:
    """Lists the instances of the cluster from the registry. The caller starts and closes `view`."""

    def __init__(self, view: RegistryView) -> None:
        self._view = view

    async def instances(self) -> list[InstanceInfo]:
        # Without a connection the view still has its last records, which may be long out of date.
        if not self._view.is_connected():
            raise AdminRequestError("the registry (--registry) does not answer")
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
    """Sends HTTP requests for draining to the instances themselves. Instances on other machines require the cluster
    `key`.
    """

    def __init__(self, client: httpx.AsyncClient, key: ClusterKey | None) -> None:
        self._client = client
        self._headers = {"authorization": f"Bearer {key.admin_token}"} if key is not None else {}

    async def drain(self, address: str, *, exit_afterwards: bool) -> None:
        """Start draining the instance at `address` (HOST:PORT). When this returns, it refuses new requests; accepted
        ones may still be running.

        With `exit_afterwards` its process exits once no request runs any more. Raises `AdminRequestError` if the
        instance does not answer or refuses.
        """
        url = f"http://{address}/admin/drain?exit={int(exit_afterwards)}"
        answer = await _request(self._client, "POST", url, headers=self._headers)
        if answer.status_code != 202:
            raise AdminRequestError(f"{address} refuses to drain: status {answer.status_code}: {answer.text}")

    async def state(self, address: str) -> InstanceState | None:
        """Return the state of the instance at `address` (HOST:PORT), or None if no connection to it is possible.

        Raises `AdminRequestError` if another program answers at the address.
        """
        # A lost connection is not an error here: callers wait for the process to end.
        try:
            answer = await self._client.get(f"http://{address}/health")
        except httpx.TransportError:
            return None
        return _decoded(answer, InstanceState)


def active_instances(seen: Sequence[InstanceInfo], role: Role) -> list[InstanceInfo]:
    """Return the instances in `seen` that have this role and are not draining."""
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
        raise AdminRequestError(f"{answer.url} is not the /health of a Baton process: {exc}") from exc
