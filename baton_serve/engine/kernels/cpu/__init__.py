"""C++ kernels for CPUs, compiled at first use; the sources are in `src`."""
