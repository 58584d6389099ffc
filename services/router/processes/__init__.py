"""Several router processes behind one port (`--workers`).

Each of them is a complete router, like one of N replicas. A further process, the supervisor, starts and restarts them
(ADR 0009).
"""
