"""Fetches images from URLs that clients send, protected against server-side request forgery (SSRF).

Images are fetched from the hosts in `--allowed-media-domains`, or with `*` from every host with public addresses only.
The router connects to the address that it has checked, and does not follow redirects: neither a DNS name nor a response
can lead it to a host in its own network.
"""

import asyncio
import ssl
from collections.abc import Callable
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


async def fetch(url: str, limits: ImageLimits, *, count: Callable[[int], None]) -> bytes:
    """Fetch the image at an http(s) URL and return its bytes. Raises `BadRequestError` if the host is not allowed, the
    fetch fails or the image is too large.

    `count` is called with the number of bytes of each piece that arrives; it raises if the request has too many bytes
    of images.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port or _PORTS[parts.scheme.lower()]
    except ValueError as exc:
        raise image_error(f"the URL of an image is invalid: {exc}") from exc
    if not host or parts.username is not None:
        raise image_error("the URL of an image must name a host, and must not contain a user name")
    if host not in limits.domains and ANY_DOMAIN not in limits.domains:
        raise image_error(
            f"images are not fetched from {host[:100]!r}: send the image as a data: URL, or start the router with"
            " --allowed-media-domains"
        )
    try:
        async with asyncio.timeout(limits.fetch_timeout_s):
            # A host that the settings name may have a private address, such as that of a store in the same cluster.
            address = host if host in limits.domains else await _public_address(host, port)
            return await _get(parts, host, address, limits, count)
    except TimeoutError:
        raise image_error(
            f"{host} did not send the image within {limits.fetch_timeout_s:g} s (--image-fetch-timeout-s)"
        ) from None
    # `UnicodeError`: a label of the host name is empty or too long.
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as exc:
        raise image_error(f"the image cannot be fetched from {host}: {exc or type(exc).__name__}") from exc


async def _public_address(host: str, port: int) -> str:
    """Resolve a host name and return one of its IP addresses.

    Raises `OSError` if the name cannot be resolved, and `BadRequestError` unless all its addresses are public.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=0)
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(is_public(address) for address in addresses):
        raise image_error(
            f"{host[:100]!r} has no public address, or also a private one: images are fetched from such a host only if"
            " --allowed-media-domains names it"
        )
    return addresses[0]


async def _get(parts: SplitResult, host: str, address: str, limits: ImageLimits, count: Callable[[int], None]) -> bytes:
    # The URL has the checked address in place of the host name, so httpx does not resolve the name again: a second
    # answer of DNS could be a private address (DNS rebinding). The name goes into the Host header and into TLS.
    target = parts._replace(netloc=_netloc(address, parts.port), fragment="").geturl()
    headers = {"host": _netloc(host, parts.port), "accept": "image/*", "accept-encoding": "identity"}
    verify: ssl.SSLContext | bool = _ssl_context() if parts.scheme.lower() == "https" else False
    # `trust_env=False` ignores proxies and credentials of the environment. `timeout=None`: the caller has a deadline.
    async with (
        httpx.AsyncClient(verify=verify, trust_env=False, timeout=None, follow_redirects=False) as client,
        client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as answer,
    ):
        if answer.is_redirect:
            raise image_error(f"{host} sent a redirect, which is not followed: send the final URL of the image")
        if answer.status_code != 200:
            raise image_error(f"{host} answered the request for the image with status {answer.status_code}")
        found = bytearray()
        # Counted while it arrives: a Content-Length header may be missing or wrong.
        async for data in answer.aiter_raw():
            count(len(data))
            found += data
            if len(found) > limits.max_bytes:
                raise image_too_large_error(limits)
        return bytes(found)


def _netloc(host: str, port: int | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


@cache
def _ssl_context() -> ssl.SSLContext:
    # Cached because reading the certificates takes tens of milliseconds.
    return ssl.create_default_context()
