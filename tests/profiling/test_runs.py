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
    rows = [
        {"backend": "standard", "seqlen": 512, "median_ms": 1.5, "reason": ""},
        {"backend": "flex", "seqlen": 512, "median_ms": float("nan"), "reason": "no, because"},
    ]
    frame = pd.DataFrame(rows)
    frame.attrs["provenance"] = {"device": "a GPU", "date": "2026-01-01T00:00:00+00:00"}
    return frame


def test_a_saved_run_comes_back_whole_and_marked_as_recorded(table, tmp_path):
    folder = save_run(table, "first", folder=tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["provenance.json", "results.csv"]
    loaded = load_run("first", folder=tmp_path)
    pd.testing.assert_frame_equal(loaded, table, check_dtype=False)
    assert loaded.attrs["provenance"] == {
        **table.attrs["provenance"],
        "recorded": True,
        "run": "first",
    }


def test_a_run_is_not_overwritten_by_accident(table, tmp_path):
    save_run(table, "first", folder=tmp_path)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_run(table, "first", folder=tmp_path)
    save_run(table.iloc[:1], "first", folder=tmp_path, overwrite=True)
    assert len(load_run("first", folder=tmp_path)) == 1


def asked(*arguments):
    parser = argparse.ArgumentParser()
    add_save_options(parser)
    return parser.parse_args(arguments)


def test_what_a_command_measured_is_not_lost_to_a_name_that_is_taken(
    table, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("labsupport.profiling.runs.runs_dir", lambda: tmp_path)
    for _ in range(3):
        save_if_asked(table, asked("--save", "mine"))
    assert list_runs(tmp_path) == ["mine", "mine-2", "mine-3"]
    assert "--overwrite would have replaced it" in capsys.readouterr().out
    save_if_asked(table, asked("--save", "mine", "--overwrite"))
    save_if_asked(table, asked())
    assert list_runs(tmp_path) == ["mine", "mine-2", "mine-3"]


def test_a_bad_name_ends_a_command_before_it_measures(capsys):
    with pytest.raises(SystemExit):
        asked("--save", "a/b")
    assert "is no name for a run" in capsys.readouterr().err


def test_a_table_without_provenance_is_not_saved(table, tmp_path):
    table.attrs.clear()
    with pytest.raises(ValueError, match="no provenance"):
        save_run(table, "first", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "a/b"])
def test_a_name_that_would_leave_the_folder_is_refused(table, tmp_path, name):
    with pytest.raises(ValueError, match="no name for a run"):
        save_run(table, name, folder=tmp_path)


def test_a_missing_run_names_those_that_exist(table, tmp_path):
    save_run(table, "first", folder=tmp_path)
    assert list_runs(tmp_path) == ["first"]
    with pytest.raises(FileNotFoundError, match="there are: first"):
        load_run("second", folder=tmp_path)


def test_provenance_names_device_versions_and_date():
    record = provenance("cpu", seed=3)
    assert record["device_kind"] == "cpu"
    assert record["seed"] == 3
    assert "torch" in record["versions"]
    assert record["date"].endswith("+00:00")


def test_absent_packages_and_commits_are_not_errors(monkeypatch, tmp_path):
    assert package_version("no-such-package-anywhere") is None
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert git_commit() is None
