"""Process groups that the tests of this folder share."""

import pytest

from labsupport.distributed import cleanup_ddp, setup_ddp


@pytest.fixture
def workers(pool):
    """Four processes in one process group."""
    return pool(4)


@pytest.fixture
def group_of_one():
    """This process as the only rank."""
    yield setup_ddp("gloo")
    cleanup_ddp()
