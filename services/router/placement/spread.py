"""Numbers that look like chance and are none: for choices that must be the same for the same question. Pure."""


def spread(number: int) -> int:
    """64 well-spread bits (the finaliser of SplitMix64, Steele, Lea and Flood 2014)."""
    mask = (1 << 64) - 1
    mixed = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)
