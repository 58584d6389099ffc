"""Lets each rank of an instance send and receive its part of KV blocks itself, from and to its own device.

Rank 0 decides everything and orders each transfer; the other ranks have a transfer node in a thread of their process.
"""

RANK_PROGRAM = "baton_serve.services.instance.rank_transfers.rank_program"
"""Module that the ranks other than 0 run."""
