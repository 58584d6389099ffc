"""Tries transports between two throw-away processes, one at each end of a pair: neither can harm its instance."""
