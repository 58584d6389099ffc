"""Everything around a step: the size of the KV cache, warm-up, planning, statistics, and reports between the layers."""
