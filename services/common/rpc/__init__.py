"""RPC between routers and instances: messages over TCP, encrypted with a cluster key, or over Unix sockets."""
