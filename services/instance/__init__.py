"""The wiring of an engine, a transfer node and the RPC server that all instance roles share.

A role (`services.prefill`, `services.decode`, `services.unified`) adds what it does with a message.
"""
