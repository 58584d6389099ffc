"""The names of devices and data types, as flags and settings spell them."""

from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda", "xpu"]
DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
