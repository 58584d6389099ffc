"""Products and attention of this process pause while another one on the same cores has the turn (cpu/turns.cpp)."""

import ctypes

from baton_serve.engine.kernels.cpu.build import KernelsUnavailableError, load_kernels


def yield_to_processes(address: int, rows: int, width: int) -> bool:
    """From now on. `address`: of `rows` rows of `width` int64 words, mapped while this process lives; the first word of
    a row is when its owner's turn ends (CLOCK_MONOTONIC, ns), 0: it has none. No rows: nobody is waited for any more.
    False: there are no kernels here that could."""
    try:
        library = load_kernels()
    except KernelsUnavailableError:
        return False
    library.baton_give_way_to(ctypes.c_void_p(address), ctypes.c_int64(rows), ctypes.c_int64(width))
    return True
