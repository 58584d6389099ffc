"""`baton doctor` checks whether this machine can serve models, and prints a remedy for each problem.

It changes nothing on the machine but caches of compiled kernels.
"""
