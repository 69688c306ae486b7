"""Processes that the tests of this folder share: each takes seconds to import PyTorch."""

import pytest

from tests.distributed.workers import Workers


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """The pool in use; a test that breaks it leaves the next one to start another."""
    pools = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def workers(pools, tmp_path_factory):
    """Four processes in one process group."""
    if not pools or pools[-1].closed:
        pools.append(Workers(4, tmp_path_factory.mktemp("workers")))
    return pools[-1]
