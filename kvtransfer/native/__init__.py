"""The only part of this package that Python cannot do fast enough: copying and hashing in one pass."""
