"""For every test: Triton kernels run in Triton's interpreter, on the CPU.

It must be said before anything imports triton (transformers does). To test on a device: `TRITON_INTERPRET=0 pytest …`.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
