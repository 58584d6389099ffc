"""The HTTP/1.1 server that routers and instances use, for ASGI applications."""
