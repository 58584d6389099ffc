"""Probe transports between two throw-away processes, one at each end of a pair, so that a hanging or crashing driver
cannot harm an instance.
"""
