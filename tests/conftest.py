"""What all tests share."""

import gc
import os
import signal
from pathlib import Path

import pytest

from tests.fresh import Python

# Before torch is imported: each worker takes its share of the cores. Workers that each use all of
# them spend their time waiting for one another.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))

# Before Transformers, which imports Triton: without a GPU its kernels have to be interpreted.
import labsupport.attention  # noqa: E402, F401

gc.freeze()  # what is imported stays: collections need not look at it
# A shell starts what runs in its background deaf to Control-C, and children inherit that: tests
# that interrupt a program would wait in vain.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def project() -> Path:
    """The project folder."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def python():
    """Starts Python processes that have PyTorch already: `python("-m", "labsupport.cli", ...)`."""
    server = Python()
    yield server
    server.close()
