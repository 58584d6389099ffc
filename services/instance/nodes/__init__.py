"""Instances on several hosts (`--nnodes`): the hosts meet at the first one, and the others run ranks only."""
