"""The producing side of a node: sends blocks to consumers."""
