"""Fixtures that all tests share."""

import gc
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.fresh import Python

# Before torch is imported. Tensors here are small: several threads would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Transformers, which imports Triton: without a GPU its kernels have to be interpreted.
import labsupport.attention  # noqa: F401
from tests.distributed.workers import pool  # noqa: F401

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


@pytest.fixture
def nobody_is_left():
    """The test ends every process that it starts."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
