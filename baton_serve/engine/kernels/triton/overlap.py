"""Kernels that start before the kernel ahead of them has ended (programmatic dependent launch), on devices that can.

Launching a kernel and starting its programs takes as long as many kernels of a decode step. With this the programs of
the next kernel start while those of a kernel still run, and wait in `start_early` until that kernel has ended.
"""
# mypy: disable-error-code="misc,no-untyped-def,no-untyped-call,untyped-decorator"

from functools import lru_cache

import torch
import triton
import triton.language as tl


def overlapping(device: torch.device) -> dict[str, bool]:
    """Return keyword arguments for the launch of a kernel whose first statement calls `start_early` with its constant
    `overlaps`. They let it start early if the device supports that.
    """
    return {"overlaps": True, "launch_pdl": True} if _overlaps(device) else {"overlaps": False}


@lru_cache(maxsize=16)
def _overlaps(device: torch.device) -> bool:
    if device.type == "cpu":  # Triton's interpreter
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


@triton.jit
def start_early(overlaps: tl.constexpr):
    """Let the next kernel start, and wait until all kernels before this one have ended. Every program of a kernel must
    call it before it reads or writes memory, and before it returns: the next kernel waits for this one alone.
    """
    if overlaps:  # both instructions have no result, but Triton wants the name of one
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
