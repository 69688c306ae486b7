"""Recorded runs with their provenance."""

import pandas as pd
import pytest

from labsupport.profiling.provenance import git_commit, package_version, provenance
from labsupport.profiling.runs import load_run, save_run


@pytest.fixture
def table():
    rows = [("standard", 512, 1.5, ""), ("flex", 512, float("nan"), "no, because")]
    frame = pd.DataFrame(rows, columns=["backend", "seqlen", "median_ms", "reason"])
    frame.attrs["provenance"] = {"device": "a GPU", "date": "2026-01-01T00:00:00+00:00"}
    return frame


def test_a_saved_run_comes_back_whole_and_is_not_overwritten_by_accident(table, tmp_path):
    folder = save_run(table, "first", folder=tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["provenance.json", "results.csv"]
    loaded = load_run("first", folder=tmp_path)
    pd.testing.assert_frame_equal(loaded, table, check_dtype=False)
    marks = {"recorded": True, "run": "first"}
    assert loaded.attrs["provenance"] == table.attrs["provenance"] | marks
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_run(table, "first", folder=tmp_path)
    with pytest.raises(FileNotFoundError, match="there are: first"):
        load_run("second", folder=tmp_path)


def test_provenance_names_device_versions_and_date_and_what_is_absent_is_no_error(
    monkeypatch, tmp_path
):
    record = provenance("cpu", seed=3)
    assert (record["device_kind"], record["seed"]) == ("cpu", 3)
    assert "torch" in record["versions"]
    assert record["date"].endswith("+00:00")
    assert package_version("no-such-package-anywhere") is None
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert git_commit() is None
