"""The protocol of one transfer, without I/O: messages, facts and clock ticks in, steps out.

`table` holds the states of both ends, `consumer` and `producer` the machines, `steps` what they ask of their driver.
"""
