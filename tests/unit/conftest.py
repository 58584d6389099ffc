"""The unit suite stays quick: fewer examples of each property than elsewhere."""

from hypothesis import settings

settings.register_profile("unit", max_examples=25, deadline=None)
settings.load_profile("unit")
