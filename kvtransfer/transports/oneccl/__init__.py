"""The transport `oneccl`: groups of two ranks of a collective library, which move blocks from device to device if they
lie on devices.
"""
