"""Serve the pages for people: the status page at `/`, and the API at `/docs` and `/redoc`.

Everything that they load comes from this server, so that they work without a network. They hold no data of the cluster:
their scripts read it from endpoints that check the API key.
"""

import gzip
import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import Request, Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "page"
_ASSET_TYPES = {"swagger-ui.js": "text/javascript", "swagger-ui.css": "text/css"}


def page_routes() -> list[Route]:
    """Return the HTTP routes of the router's web pages and of the files that these load. They need no API key."""
    assets = [_asset_route(name, media_type) for name, media_type in _ASSET_TYPES.items()]
    # ReDoc loads its scripts from another host, so that clients which look for its page get the one of /docs.
    return [_page_route("/", "index.html"), *(_page_route(path, "docs.html") for path in ("/docs", "/redoc")), *assets]


def _page_route(path: str, name: str) -> Route:
    html = (_FOLDER / name).read_text()
    headers = {"cache-control": "no-cache", "content-security-policy": _policy(html)}

    def page(request: Request) -> Response:
        return Response(html, media_type="text/html", headers=headers)

    return Route(path, page, include_in_schema=False)


def _policy(html: str) -> str:
    """Return the Content-Security-Policy for a page with this HTML: it may load files of this server and its own inline
    elements.

    The status page shows texts that models generate and instances report, and it keeps the API key. Under this policy
    injected markup can neither run a script, nor load anything from elsewhere, nor send data there.
    """
    return (
        f"default-src 'none'; script-src 'self'{_hashes('script', html)}; style-src 'self'{_hashes('style', html)}; "
        "connect-src 'self'; img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    )


def _hashes(tag: str, html: str) -> str:
    """Return the part of a Content-Security-Policy that allows the inline elements `<tag>` of a page: the hash of
    each.
    """
    inline = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return "".join(f" 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in inline)


def _asset_route(name: str, media_type: str) -> Route:
    # Starlette calls plain functions in a thread: reading and decompressing do not block the event loop.
    def asset(request: Request) -> Response:
        is_packed = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"cache-control": "max-age=3600", "vary": "accept-encoding"}
        if is_packed:
            headers["content-encoding"] = "gzip"
        return Response(_asset(name, is_packed=is_packed), media_type=media_type, headers=headers)

    return Route(f"/docs/{name}", asset, include_in_schema=False)


# Kept, because these files need no API key: each of thousands of slow clients would have its own copy.
@cache
def _asset(name: str, *, is_packed: bool) -> bytes:
    content = (_FOLDER / f"{name}.gz").read_bytes()
    return content if is_packed else gzip.decompress(content)
