"""The one piece of this package that Python cannot do fast enough: copying and hashing in the same pass."""
