"""C++ kernels for CPUs, built at first use; the sources are in `src`."""
