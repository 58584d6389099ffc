"""`python -m baton_serve.services.common.die_with_parent PID MODULE …` runs a module that is killed with its parent.

PID is the parent. With Linux's PR_SET_PDEATHSIG, `kill -9` of a supervisor leaves no orphans. It is set here and not in
the supervisor between fork and exec: Python code there can deadlock on locks that other threads held during the fork.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel to kill this process when its parent dies, then run the module named in the second argument as
    `__main__`. The first argument is the parent's process id.
    """
    parent, module = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # If the parent died before `prctl`, the kernel sends no signal.
    if os.getppid() != parent:
        sys.exit(f"{module}: the parent process {parent} has ended already")
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
