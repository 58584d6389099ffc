"""The decisions of the engine, without torch: requests, scheduling, blocks and step times."""
