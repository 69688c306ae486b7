"""Fixtures that the tests of the maintainers' programs share."""

import pytest

from labsupport.profiling import runs


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """Runs are saved in an empty folder; `saved(NAME)` loads one."""
    monkeypatch.setattr(runs, "data_dir", lambda: tmp_path)
    return runs.load_run
