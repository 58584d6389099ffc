"""Sums and exchanges between tensor-parallel ranks, and which part of the weights each rank has."""
