"""Let this process's products and attention pause while another process on the same cores has its turn
(src/turns.cpp).
"""

import ctypes

from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels


def yield_to_processes(address: int, rows: int, width: int) -> bool:
    """Make the CPU kernels of this process pause while another process on the same cores computes.

    The processes share `rows` rows of `width` int64 words at `address`, which must stay mapped until this process ends.
    The first word of a row is the time at which its owner's computation ends at the latest (CLOCK_MONOTONIC, ns), or 0.
    With `rows` 0, this process waits for others no longer. Return False if this machine has no C++ kernels.
    """
    try:
        library = load_kernels()
    except KernelsUnavailableError:
        return False
    library.baton_give_way_to(ctypes.c_void_p(address), ctypes.c_int64(rows), ctypes.c_int64(width))
    return True
