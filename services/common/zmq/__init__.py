"""ZeroMQ on the event loop: block events from instances to routers."""
