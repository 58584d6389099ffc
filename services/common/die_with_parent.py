"""`python -m baton_serve.services.common.die_with_parent PID MODULE …` runs a module that ends with its parent PID.

So a `kill -9` of the supervisor leaves no orphans (Linux's PR_SET_PDEATHSIG, set here and not between fork and exec,
where other threads' locks may be held for ever).
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"{module}: the process that started this one is gone")
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
