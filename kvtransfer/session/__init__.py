"""The protocol of one transfer as pure state machines: messages, facts and clock ticks go in, steps for the driver come
out.

`states` holds the states of both ends, `consumer_session` and `producer_session` the machines, and `steps` the requests
to their drivers.
"""
