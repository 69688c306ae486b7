"""The capstone: what students start from runs, the example runs, and its report says what is so."""

import json
import os
import re
import runpy
import shutil
import sys

import pandas as pd
import pytest

FLASH = '''def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The template's hole, filled."""
    from labsupport.attention import attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, causal={causal}).transpose(1, 2)
'''


@pytest.fixture
def capstone(project):
    return project / "capstone"


@pytest.fixture
def copy(capstone, tmp_path):
    """The folder that `cp -r capstone/template work/capstone` makes."""
    return shutil.copytree(capstone / "template", tmp_path / "capstone")


def fill(folder, causal=True):
    """Write `flash`, as the task asks for."""
    file = folder / "train.py"
    source = file.read_text()
    hole = re.search(r"def flash\(.*?\n\n\n", source, re.DOTALL)[0]
    assert "NotImplementedError" in hole
    file.write_text(source.replace(hole, FLASH.format(causal=causal) + "\n\n"))


def functions(folder, monkeypatch):
    """The names of a measure.py, which imports the train.py beside it."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    names = runpy.run_path(str(folder / "measure.py"))
    monkeypatch.delitem(sys.modules, "train")
    return names


@pytest.mark.slow
def test_the_template_trains_says_what_is_missing_and_measures_with_provenance(
    python, project, copy
):
    def run(program, *arguments):
        environment = {**os.environ, "PYTHONPATH": str(project)}
        return python(copy / program, *arguments, cwd=project, env=environment)

    done = run("train.py", "--steps", 3, "--length", 64)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step +\d+: (\d+\.\d+)", done.stdout)]
    assert losses[-1] < losses[0]
    done = run("measure.py", "--lengths", 32)
    assert done.returncode != 0
    assert "flash is not written yet" in done.stderr.splitlines()[-1]
    fill(copy)
    done = run("measure.py", "--lengths", 32, 64, "--seconds", 0.2)
    assert done.returncode == 0, done.stderr
    assert ", within the allowed" in done.stdout
    assert "kernel: sdpa_flash ran" in done.stdout
    table = pd.read_csv(copy / "results" / "steps" / "results.csv")
    assert list(table.seqlen) == [32, 64]
    record = json.loads((copy / "results" / "steps" / "provenance.json").read_text())
    assert record["versions"]["torch"]
    assert "measure.py --lengths 32 64" in record["command"]


def test_the_template_notices_a_forgotten_mask(copy, monkeypatch):
    fill(copy, causal=False)
    assert not functions(copy, monkeypatch)["judge"](32, "cpu").ok


def test_the_example_runs_with_both_attentions_and_they_learn_the_same(capstone, monkeypatch):
    monkeypatch.syspath_prepend(str(capstone / "example"))
    train = runpy.run_path(str(capstone / "example" / "train.py"))["train"]
    naive, flash = (train(name, 64, 4) for name in ("naive", "flash"))
    assert naive == pytest.approx(flash, abs=1e-4)
    assert flash[-1] < flash[0]


def test_the_examples_gradients_obey_the_labs_rule(capstone, monkeypatch):
    verdict = functions(capstone / "example", monkeypatch)["judge"](100, "cpu")
    assert verdict.ok, verdict


# --- the report -----------------------------------------------------------------------------------


@pytest.fixture
def report(capstone):
    return (capstone / "example" / "REPORT.md").read_text(encoding="utf-8")


@pytest.fixture
def results(capstone):
    return pd.read_csv(capstone / "example" / "results" / "steps" / "results.csv")


def test_the_reports_headings_are_those_of_the_template(capstone, report):
    asked = (capstone / "template" / "REPORT.md").read_text(encoding="utf-8")
    assert len(report.split()) <= 1200, "what the task allows"
    headings = r"^## (.+)$"
    assert re.findall(headings, report, re.M) == re.findall(headings, asked, re.M)


def test_the_table_of_the_report_is_the_recorded_run(report, results):
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \(([\d.]+) to ([\d.]+)\)"
        r" \| ([\d.]+) \| ([\d.]+) \|$",
        report,
        re.M,
    )
    said = [[float(cell.replace(",", "")) for cell in row] for row in rows]
    assert len(said) == len(results)
    for row, run in zip(said, results.itertuples(), strict=True):
        assert row == [
            run.seqlen,
            round(run.naive_ms),
            round(run.flash_ms),
            round(run.gain, 2),
            round(run.gain_q1, 2),
            round(run.gain_q3, 2),
            round(run.naive_peak_bytes / 2**20, 1),
            round(run.flash_peak_bytes / 2**20, 1),
        ]


def test_the_memory_that_the_report_shows_is_the_same_here(capstone, monkeypatch, results):
    """On a CPU it does not depend on the machine, but for the scratch space of the kernels."""
    names = functions(capstone / "example", monkeypatch)
    expected = results[results.seqlen == 256].iloc[0]
    for name in ("naive", "flash"):
        attention = names["ATTENTIONS"][name]
        step = names["make_step"](attention, 256, "cpu")
        step()
        peak = names["measure_peak_memory"](step, device="cpu").peak_bytes
        assert peak == pytest.approx(expected[f"{name}_peak_bytes"], rel=0.05)


def test_the_rubric_adds_up_to_a_hundred(capstone):
    text = (capstone / "RUBRIC.md").read_text(encoding="utf-8")
    criteria = [int(p) for p in re.findall(r"^\| \d+ \|.*\| (\d+) \|$", text, re.M)]
    groups = [int(p) for p in re.findall(r"^\| \*\*.+\*\* \| +\| \*\*(\d+)\*\* \|$", text, re.M)]
    assert sum(criteria) == sum(groups) == 100
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", text, re.M)] == [*range(1, 21)]
