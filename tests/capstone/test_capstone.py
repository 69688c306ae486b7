"""The capstone: what students start from runs, the example runs, and its report says what is so."""

import json
import math
import os
import re
import runpy
import shutil
import subprocess
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
    """What `cp -r capstone/template work/capstone` makes."""
    return shutil.copytree(capstone / "template", tmp_path / "capstone")


def run(project, folder, program, *arguments):
    """A program of the capstone, started as a student does; returns the finished process."""
    return subprocess.run(
        [sys.executable, str(folder / program), *map(str, arguments)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


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


def test_the_template_trains_as_it_is_handed_out(project, copy):
    done = run(project, copy, "train.py", "--steps", 3, "--length", 64)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step +\d+: (\d+\.\d+)", done.stdout)]
    assert losses[-1] < losses[0]


def test_the_template_says_what_is_missing(project, copy):
    done = run(project, copy, "measure.py", "--lengths", 32)
    assert done.returncode != 0
    assert "flash is not written yet" in done.stderr.splitlines()[-1]


def test_with_the_hole_filled_the_template_measures_and_keeps_provenance(project, copy):
    fill(copy)
    done = run(project, copy, "measure.py", "--lengths", 32, 64, "--seconds", 0.2)
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


def test_what_measures_is_the_same_file_for_template_and_example(capstone):
    own, examples = (capstone / name / "measure.py" for name in ("template", "example"))
    assert own.read_bytes() == examples.read_bytes()


def test_the_example_runs_with_both_attentions_and_they_learn_the_same(capstone, monkeypatch):
    monkeypatch.syspath_prepend(str(capstone / "example"))
    train = runpy.run_path(str(capstone / "example" / "train.py"))["train"]
    naive, flash = (train(name, 64, 4) for name in ("naive", "flash"))
    assert naive == pytest.approx(flash, abs=1e-4)
    assert flash[-1] < flash[0]


@pytest.mark.parametrize("seqlen", [64, 200])
def test_the_examples_gradients_obey_the_labs_rule(capstone, monkeypatch, seqlen):
    verdict = functions(capstone / "example", monkeypatch)["judge"](seqlen, "cpu")
    assert verdict.ok, verdict


# --- the report -----------------------------------------------------------------------------------


@pytest.fixture
def report(capstone):
    return (capstone / "example" / "REPORT.md").read_text(encoding="utf-8")


@pytest.fixture
def results(capstone):
    return pd.read_csv(capstone / "example" / "results" / "steps" / "results.csv")


@pytest.fixture
def record(capstone):
    folder = capstone / "example" / "results" / "steps"
    return json.loads((folder / "provenance.json").read_text(encoding="utf-8"))


@pytest.fixture
def program(capstone, monkeypatch):
    return runpy.run_path(str(capstone / "example" / "train.py"))


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


def test_the_report_names_the_machine_of_the_run(report, record):
    assert record["device"] in report
    assert record["versions"]["torch"] in report
    assert record["commit"][:8] in report
    assert not record["commit"].endswith("+changes")
    assert str(record["load_average"]) in report
    assert record["gradients"].split(";")[0] in " ".join(report.split())


def test_what_the_report_says_of_sizes_follows_from_the_program(report, program, results):
    flat = " ".join(report.split())
    torch_model = program["make_model"](program["ATTENTIONS"]["flash"])
    parameters = sum(p.numel() for p in torch_model.parameters())
    assert f"{parameters:,} weights" in flat
    batch, heads, layers = program["BATCH"], program["HEADS"], program["LAYERS"]
    longest = max(program["LENGTHS"])
    one = batch * heads * longest**2 * 4 / 2**20
    assert f"{one:.0f} MiB" in flat
    assert f"{layers * one:.0f} MiB" in flat
    # The largest tensor of the textbook's step is such a matrix; of the other, none is near it.
    last = results[results.seqlen == longest].iloc[0]
    assert last.naive_largest_bytes == one * 2**20
    assert last.flash_largest_bytes < last.naive_largest_bytes / 8


def test_the_reports_predictions_follow_and_its_measurements_are_those_of_the_run(
    report, program, results
):
    width, layers = program["WIDTH"], program["LAYERS"]
    run = results.set_index("seqlen")

    def flop_share(n):
        rest = 2 * n * (layers * 12 * width**2 + width * 256)
        return layers * 4 * n**2 * width / (layers * 4 * n**2 * width + rest)

    def whole(share, alone):
        return 1 / (1 - share + share / alone)

    long, short = run.loc[2048], run.loc[256]
    saved = (long.naive_peak_bytes - long.flash_peak_bytes) / 2**20
    expected = [
        (
            "attention's share, 2,048 bytes",
            f"{flop_share(2048):.0%}",
            f"{long.attention_share:.0%}",
        ),
        ("the same, 256 bytes", f"{flop_share(256):.0%}", f"{short.attention_share:.0%}"),
        ("gain of a step, 2,048 bytes", f"{whole(flop_share(2048), 3):.1f}", f"{long.gain:.2f}"),
        ("the same, 256 bytes", f"{whole(flop_share(256), 1.5):.1f}", f"{short.gain:.2f}"),
        ("memory saved, 2,048 bytes", f"{5 * 128} MiB", f"{saved:.0f} MiB"),
    ]
    for row in expected:
        assert f"| {' | '.join(row)} |" in report
    before, after = long.naive_ms - long.nothing_ms, long.flash_ms - long.nothing_ms
    flat = " ".join(report.split())
    assert f"only {before / after:.1f} times as fast" in flat
    assert f"{long.nothing_ms:,.0f} ms: {before:,.0f} ms of attention before, {after:,.0f}" in flat
    assert f"{1 - long.nothing_ms / long.flash_ms:.0%} of the step with `flash`" in flat
    assert f"the median of {min(run.pairs)} to {max(run.pairs)} pairs" in flat
    spread = max((run.gain_q3 / run.gain - 1).max(), (1 - run.gain_q1 / run.gain).max())
    assert f"quartiles lie within {math.ceil(spread * 100)}% of it" in flat
    assert long.gain_q1 > run.loc[1024].gain_q3, "the gain still grows"


def test_the_second_run_says_what_the_report_says_of_it(capstone, report, results):
    again = pd.read_csv(capstone / "example" / "results" / "again" / "steps" / "results.csv")
    assert list(again.seqlen) == list(results.seqlen)
    assert "every ratio within 3%" in report
    assert (again.gain / results.gain - 1).abs().max() < 0.03
    for column in ("naive_peak_bytes", "flash_peak_bytes"):
        assert again[column].equals(results[column])


def test_the_losses_of_the_report_are_those_that_the_program_printed(capstone, report):
    printed = {
        name: (capstone / f"example/results/training/{name}.txt").read_text(encoding="utf-8")
        for name in ("naive", "flash")
    }
    losses = {name: re.findall(r": (\d\.\d{3}) nats", text) for name, text in printed.items()}
    assert losses["naive"] == losses["flash"]
    first, last = losses["flash"][0], losses["flash"][-1]
    assert f"the loss falls from {first} to {last} nats a gap" in " ".join(report.split())
    for name, text in printed.items():
        assert text.startswith(f"$ python capstone/example/train.py --attention {name}\n")
        assert re.search(r"commit ([0-9a-f]{8})", text)[1] in report


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


def test_the_example_gets_half_only_where_the_rubric_says_so(capstone):
    table, example = (
        (capstone / "RUBRIC.md").read_text(encoding="utf-8").split("## The example's points")
    )
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \| 5 \|$", table, re.M))
    halves = re.findall(r"^- Row (\d+): half\.", example, re.M)
    for number in halves:
        assert rows[number].endswith(": half."), number
    assert f"By the table it gets {100 - 2.5 * len(halves):g}:" in example
