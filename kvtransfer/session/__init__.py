"""The protocol of one transfer as pure state machines: messages, facts and clock ticks go in, steps for the driver come
out.

`table` holds the states of both ends, `consumer` and `producer` hold the machines, and `steps` holds the requests to
their drivers.
"""
