"""The HTTP layer of the router: the gateway in front of all endpoints, and the endpoints that generate nothing."""
