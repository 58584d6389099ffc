"""Fetches an image from where a client says it is: only from hosts that the router's owner named, or, if any may be
asked, from public addresses alone. The address that was checked is the one that is connected to, and redirects are not
followed: neither a name nor an answer can lead to what lies behind the router."""

import asyncio
import ssl
from functools import cache
from urllib.parse import SplitResult, urlsplit

import httpx

from baton_serve.services.router.protocol.image_limits import (
    ANY_DOMAIN,
    ImageLimits,
    image_error,
    image_too_large_error,
)
from baton_serve.services.router.text.multimodal.public_addresses import is_public

_PORTS = {"http": 80, "https": 443}


async def fetch(url: str, limits: ImageLimits) -> bytes:
    """Raises `BadRequestError`."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or _PORTS[parts.scheme.lower()]
    except ValueError as exc:
        raise image_error(f"an image's URL is none: {exc}") from exc
    if not host or parts.username is not None:
        raise image_error("an image's URL must name a host, and no user")
    if host not in limits.domains and ANY_DOMAIN not in limits.domains:
        raise image_error(
            f"images are not fetched from {host[:100]!r}: send the image itself as a data: URL, or have the router"
            " started with --allowed-media-domains"
        )
    try:
        async with asyncio.timeout(limits.fetch_timeout_s):
            address = host if host in limits.domains else await _public_address(host, port)
            return await _get(parts, host, address, limits)
    except TimeoutError:
        raise image_error(f"{host} did not send the image within {limits.fetch_timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
        raise image_error(f"the image cannot be fetched from {host}: {exc or type(exc).__name__}") from exc


async def _public_address(host: str, port: int) -> str:
    """Raises `OSError` for a name that has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=0)
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(is_public(address) for address in addresses):
        raise image_error(
            f"{host[:100]!r} has no public address: images are fetched from private ones only if"
            " --allowed-media-domains names the host itself"
        )
    return addresses[0]


async def _get(parts: SplitResult, host: str, address: str, limits: ImageLimits) -> bytes:
    target = parts._replace(netloc=_netloc(address, parts.port), fragment="").geturl()
    headers = {"host": _netloc(host, parts.port), "accept": "image/*", "accept-encoding": "identity"}
    verify: ssl.SSLContext | bool = _ssl_context() if parts.scheme.lower() == "https" else False
    async with (
        httpx.AsyncClient(verify=verify, trust_env=False, timeout=None, follow_redirects=False) as client,
        client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as answer,
    ):
        if answer.is_redirect:
            raise image_error(f"{host} redirects, and redirects are not followed: name the image's own address")
        if answer.status_code != 200:
            raise image_error(f"{host} answered with status {answer.status_code} when it was asked for the image")
        found = bytearray()
        async for data in answer.aiter_raw():
            found += data
            if len(found) > limits.max_bytes:
                raise image_too_large_error(limits)
        return bytes(found)


def _netloc(host: str, port: int | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


@cache
def _ssl_context() -> ssl.SSLContext:
    """Reading the certificates takes tens of milliseconds."""
    return ssl.create_default_context()
