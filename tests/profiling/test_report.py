"""Recorded runs with their provenance, and `labsupport doctor --report`."""

import re

import pandas as pd
import pytest
from typer.testing import CliRunner

import labsupport
from labsupport.cli import app
from labsupport.profiling import benchmark, bug_report
from labsupport.profiling.provenance import git_commit, package_version, provenance
from labsupport.profiling.runs import (
    load_run,
    save_run,
)


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.slow
def test_the_report_holds_what_a_bug_report_needs(tmp_path):
    report, log = tmp_path / "report.md", tmp_path / "train.log"
    log.write_text("\n".join(f"line {n}" for n in range(300)))
    done = doctor("--report", report, "--log", log)
    assert done.exit_code == 0, done.output
    text = report.read_text()
    assert text.startswith(f"# labsupport {labsupport.__version__}: bug report")
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections == ["Doctor", "System and versions", "Attention", "End of train.log"]
    parts = "commit ", "[ok] Python", "PyTorch version", "sdpa_flash", "flash-attn-4"
    assert all(part in text for part in parts)
    ran = re.findall(r"^(\w+), causal: \w+ ran \(.+\)", text, re.MULTILINE)  # which kernel
    assert ran == ["float32", "float16", "bfloat16"]
    assert re.search(r"^self-test: all \d+ within the allowed error", text, re.MULTILINE)
    assert "````text\nline 100\n" in text  # the last 200 lines
    assert "Read it before you post it" in text
    assert "Read it before you post it" in done.output


def test_a_report_overwrites_nothing_and_says_so(tmp_path):
    report, new = tmp_path / "report.md", tmp_path / "new.md"
    report.write_text("mine")
    for error, arguments in (
        (FileExistsError, ("--report", report)),
        (FileNotFoundError, ("--report", new, "--log", tmp_path / "no.log")),
        (ValueError, ("--log", report)),
    ):
        with pytest.raises(error):
            doctor(*arguments)
    assert report.read_text() == "mine"
    assert not new.exists()


def test_the_self_test_fails_for_a_wrong_implementation(monkeypatch, capsys):
    right = benchmark.attention

    def shifted(q, k, v, **options):
        return right(q, k, v, **options) * (1.05 if options["backend"] != "standard" else 1)

    monkeypatch.setattr(benchmark, "attention", shifted)
    bug_report.main()
    assert "self-test: WRONG RESULTS" in capsys.readouterr().out


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
