import argparse

import pandas as pd
import pytest

from labsupport.profiling.provenance import git_commit, package_version, provenance
from labsupport.profiling.runs import (
    add_save_options,
    list_runs,
    load_run,
    save_if_asked,
    save_run,
)


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


def test_what_a_command_measured_is_not_lost_to_a_name_that_is_taken(
    table, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("labsupport.profiling.runs.runs_dir", lambda: tmp_path)
    parser = argparse.ArgumentParser()
    add_save_options(parser)
    for line in (*["--save mine"] * 3, "--save mine --overwrite", ""):
        save_if_asked(table, parser.parse_args(line.split()))
    assert list_runs(tmp_path) == ["mine", "mine-2", "mine-3"]
    assert capsys.readouterr().out.count("--overwrite would have replaced it") == 2


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "a/b", "first"])
def test_a_name_that_would_leave_the_folder_or_no_provenance_is_refused(table, tmp_path, name):
    if name == "first":
        table.attrs.clear()
    with pytest.raises(ValueError, match=r"no name for a run|no provenance"):
        save_run(table, name, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


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
