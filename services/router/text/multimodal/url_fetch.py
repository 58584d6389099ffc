"""Decides which `http` URLs of images are permitted (`--allowed-media-domains`, SSRF), and fetches them.

Files are fetched from the hosts in `--allowed-media-domains`, or with `*` from every host with public addresses only.
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
    media_error,
    too_large_error,
)
from baton_serve.services.router.text.multimodal.media_parts import Kind, MediaPart
from baton_serve.services.router.text.multimodal.public_addresses import is_public

_PORTS = {"http": 80, "https": 443}


async def fetch(part: MediaPart, limits: ImageLimits, *, count: Callable[[int], None]) -> bytes:
    """Fetch an image or video from the web. Raises `BadRequestError` if the host is not allowed or the fetch fails.

    `count` is called with the number of bytes of each piece that arrives; it raises if the request has too many bytes
    of images.
    """
    noun, kind = part.noun, part.kind
    timeout_s = limits.fetch_timeout_s_of(kind)
    try:
        parts = urlsplit(part.url)
        host, port = (parts.hostname or "").lower(), parts.port or _PORTS[parts.scheme.lower()]
    except ValueError as exc:
        raise media_error(f"the URL of {noun} is invalid: {exc}", kind) from exc
    if not host or parts.username is not None:
        raise media_error(f"the URL of {noun} must name a host, and must not contain a user name", kind)
    if host not in limits.domains and ANY_DOMAIN not in limits.domains:
        raise media_error(
            f"{kind}s are not fetched from {host[:100]!r}: send the {kind} as a data: URL, or start the router with"
            " --allowed-media-domains",
            kind,
        )
    try:
        async with asyncio.timeout(timeout_s):
            # A host that the settings name may have a private address, such as that of a store in the same cluster.
            address = host if host in limits.domains else await _public_address(host, port)
            return await _get(parts, host, address, kind, limits, count)
    except TimeoutError:
        raise media_error(
            f"{host} did not send the {kind} within {timeout_s:g} s (--{kind}-fetch-timeout-s)", kind
        ) from None
    # `UnicodeError`: a label of the host name is empty or too long.
    except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as exc:
        raise media_error(f"the {kind} cannot be fetched from {host}: {exc or type(exc).__name__}", kind) from exc


async def _public_address(host: str, port: int) -> str:
    """Resolve a host name and return one of its IP addresses.

    Raises `OSError` if the name cannot be resolved, and `BadRequestError` unless all its addresses are public.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=0)
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(is_public(address) for address in addresses):
        raise media_error(
            f"{host[:100]!r} has no public address, or also a private one: files are fetched from such a host only if"
            " --allowed-media-domains names it"
        )
    return addresses[0]


async def _get(
    parts: SplitResult, host: str, address: str, kind: Kind, limits: ImageLimits, count: Callable[[int], None]
) -> bytes:
    # The URL has the checked address in place of the host name, so httpx does not resolve the name again: a second
    # answer of DNS could be a private address (DNS rebinding). The name goes into the Host header and into TLS.
    target = parts._replace(netloc=_netloc(address, parts.port), fragment="").geturl()
    headers = {"host": _netloc(host, parts.port), "accept": f"{kind}/*", "accept-encoding": "identity"}
    verify: ssl.SSLContext | bool = _ssl_context() if parts.scheme.lower() == "https" else False
    # `trust_env=False` ignores proxies and credentials of the environment. `timeout=None`: the caller has a deadline.
    async with (
        httpx.AsyncClient(verify=verify, trust_env=False, timeout=None, follow_redirects=False) as client,
        client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as answer,
    ):
        if answer.is_redirect:
            raise media_error(f"{host} sent a redirect, which is not followed: send the final URL of the {kind}", kind)
        if answer.status_code != 200:
            raise media_error(f"{host} answered the request for the {kind} with status {answer.status_code}", kind)
        found = bytearray()
        # Counted while it arrives: a Content-Length header may be missing or wrong.
        async for data in answer.aiter_raw():
            count(len(data))
            found += data
            if len(found) > limits.bytes_of(kind):
                raise too_large_error(limits, kind)
        return bytes(found)


def _netloc(host: str, port: int | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


@cache
def _ssl_context() -> ssl.SSLContext:
    # Cached because reading the certificates takes tens of milliseconds.
    return ssl.create_default_context()
