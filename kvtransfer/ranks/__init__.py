"""Transfers in which each rank of an instance sends its part of the blocks itself, without a mirror in host memory.

Both instances must divide blocks in the same way (`InstanceRecord.rank_transfers`). If such a transfer fails, the rest
goes through the mirror, as whole blocks.
"""
