"""Which device the tests of engines and of whole clusters run on: BATON_TEST_DEVICE, or else the CPU."""

import os

import torch

DEVICE = os.environ.get("BATON_TEST_DEVICE", "cpu")
"""What is tested holds on every device; where there is one, run these tests on it too."""


def flags_of(number: int) -> list[str]:
    """For the instance of this number on this machine: its device, in turns."""
    if DEVICE == "cpu":
        return ["--device", DEVICE]
    return ["--device", DEVICE, "--device-index", str(number % torch.get_device_module(DEVICE).device_count())]
