"""Collectives between tensor-parallel ranks, and the part of the weights that each rank holds."""
