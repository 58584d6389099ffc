"""Dense decoders without transformers, whose import takes longer than everything else a start does.

Only what is fully understood is loaded here: a folder whose config says anything else is left to transformers.
"""
