"""Messages between processes over ZeroMQ: RPC between routers and instances, and block events."""
