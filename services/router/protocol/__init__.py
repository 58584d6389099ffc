"""Defines the HTTP API's messages (requests, responses, errors) as values, and the ASGI functions of endpoints."""
