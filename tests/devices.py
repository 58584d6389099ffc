"""Which device the tests of engines and of whole clusters run on: BATON_TEST_DEVICE, or else the CPU."""

import os

import torch

DEVICE = os.environ.get("BATON_TEST_DEVICE", "cpu")
"""Device of the tests. They hold on every device: run them on an accelerator, too, if there is one."""


def flags_of(number: int) -> list[str]:
    """Return the flags that give the instance with this number a device; devices are assigned in rotation."""
    if DEVICE == "cpu":
        return ["--device", DEVICE]
    return ["--device", DEVICE, "--device-index", str(number % torch.get_device_module(DEVICE).device_count())]
