"""A deterministic replacement for a random generator: placement must give the same answer for the same input. Pure."""


def spread(number: int) -> int:
    """Return 64 bits that look random and depend on `number` alone.

    This is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    mask = (1 << 64) - 1
    # The constants are those of SplitMix64. Without the multiplications by odd numbers, consecutive turns would give
    # neighbouring values, and the policy `random` would take instances in order.
    mixed = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)
