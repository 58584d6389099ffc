"""The consuming side of a node: fetches blocks from producers."""
