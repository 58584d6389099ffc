"""Everything that all instance roles share: an engine, a transfer node and an RPC server, wired into one process.

A role (`services.prefill`, `services.decode`, `services.unified`) adds a handler, which serves the messages of routers;
`services.encode` needs none.
"""
