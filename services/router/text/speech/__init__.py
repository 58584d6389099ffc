"""Speech recognition: the tokens and windows of a model (`speech_profile`), files cut into windows
(`cutter_processes`), and tokens converted to segments of text (`transcript`).
"""
