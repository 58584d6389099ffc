"""Speech recognition: the tokens and windows of a model (`profile`), files cut into windows (`cutting`), and tokens
converted to segments of text (`transcript`).
"""
