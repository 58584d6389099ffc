"""The decisions of the engine, without torch: requests, scheduling, block allocation and step times."""
