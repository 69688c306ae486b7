"""Processes that the tests of this folder share."""

from tests.distributed.workers import pool

__all__ = ["pool"]
