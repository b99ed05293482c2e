"""Tests. NumPy, which checks the numbers, multiplies on one thread: those of OpenBLAS wait for work in a loop, and take
the cores from the other processes of the tests."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
