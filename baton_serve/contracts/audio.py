"""Limits of audio that router and instances agree on.

Between them a window of audio travels as a WAV file with 16-bit samples, at the rate and with the channels of the
client's file: what is lost by rounding is less than what lossy formats lose, and instances need no other decoder.
"""

SAMPLE_BYTES = 2
"""Bytes of one sample of one channel."""
MAX_RATE_HZ = 96_000
"""Highest sample rate of a file."""
RATE_STEP_HZ = 25
"""Sample rates are multiples of this, as all usual ones are: the tables for resampling others would be very large."""
MAX_CHANNELS = 8
"""Largest number of channels of a file. They are averaged."""
