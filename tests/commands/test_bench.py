"""`labsupport bench`, `sweep` and `compare`, run as the program runs them."""

import json
import math
import re
import statistics

import pandas as pd
import pytest
from typer.testing import CliRunner

from labsupport.cli import app
from labsupport.commands import bench
from labsupport.commands.bench import PROCESSES, exceeds
from labsupport.commands.compare import judge_table, report, verdict, what_next
from labsupport.profiling.grids import Case
from labsupport.profiling.hardware import Ceilings
from labsupport.profiling.runs import load_run
from tests.commands.program import program

SMALL = ["--batch", 1, "--nheads", 2, "--headdim", 16, "--device", "cpu", "--no-grad"]
CEILINGS = Ceilings("a device", 100.0, {"float32": 2.0, "bfloat16": 50.0})
FIGURES = ("min_ms", "mean_ms", "max_ms", "repeats", "peak_tflops", "average_tflops")


def test_bench_prints_and_writes_times_speed_memory_and_the_ceiling(tmp_path):
    grad = SMALL[:-1]
    said = program("bench", "--seqlen", 64, *grad, "--repeats", 3, "--backend", "sdpa_flash").stdout
    wanted = "sdpa_flash, forward+backward, batch 1, 64 tokens, 2 heads, head_dim 16, float32"
    for part in (wanted, "n=3", "kernel", "time     min", "median", "speed    peak", "memory",
                 "ceiling"):  # fmt: skip
        assert part in said
    typed = ["--causal", "--dtype", "fp16", "--json", "-", "--csv", tmp_path / "a.csv"]
    written = json.loads(program("bench", "--seqlen", 64, *SMALL, "--repeats", 3, *typed).stdout)
    (row,) = written["results"]
    assert (row["seqlen"], row["causal"], row["dtype"]) == (64, True, "float16")
    assert written["provenance"]["device_kind"] == "cpu"
    assert pd.read_csv(tmp_path / "a.csv").repeats.tolist() == [3]


def test_a_backend_that_cannot_run_says_why_and_what_to_do():
    done = program("bench", "--seqlen", 64, *SMALL, "--backend", "sdpa_cudnn", ok=False)
    assert "runs on cuda, not on cpu" in done.stdout
    assert "labsupport compare shows all" in done.stdout


def test_sweep_measures_each_case_and_draws_a_chart(tmp_path):
    done = program(
        "sweep", "--seqlen", "64,128", "--backends", "standard,sdpa_flash", "--nheads", 2,
        "--headdim", 16, "--device", "cpu", "--no-grad", "--repeats", 3, "--quiet",
        "--chart", tmp_path / "time.png", "--csv", tmp_path / "rows.csv",
    )  # fmt: skip
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert sorted(zip(rows.backend, rows.seqlen, strict=True)) == [
        ("sdpa_flash", 64), ("sdpa_flash", 128), ("standard", 64), ("standard", 128)
    ]  # fmt: skip
    assert (tmp_path / "time.png").read_bytes()[:4] == b"\x89PNG"
    assert "vs standard" in done.stdout


def test_compare_names_the_fastest_and_the_leanest(monkeypatch):
    names = ["standard", "sdpa_flash", "flash_torch"]  # flex takes a C++ compiler long
    monkeypatch.setattr("labsupport.profiling.shapes.measurable_backends", lambda device: names)
    done = program("compare", "--seqlen", 32, *SMALL, "--repeats", 4, "--json", "-")
    for name in (*names, "fastest", "leanest", "of ceiling"):
        assert name in done.stderr
    assert [row["repeats"] for row in json.loads(done.stdout)["results"]] == [4, 4, 4, None]
    for name in names:  # the progress bar names the backend at work
        assert re.search(rf"case(/s)?, {name}, 32 tokens\]", done.stderr)


def row(backend="sdpa_flash", ms=1.0, **changes):
    case = Case(backend, 4096, heads=8)
    return vars(case) | {
        "status": "ok", "reason": "", "kernel": "k", "median_ms": ms, "q1_ms": ms, "q3_ms": ms,
        "tflops": 30.0, "peak_memory_bytes": 1,
    } | changes  # fmt: skip


def test_verdicts_and_advice_follow_from_the_first_rule_that_applies():
    shares = (0.51, 0.26, 0.24, 1.2, math.nan)
    assert [verdict(share) for share in shares] == ["good", "fair", "to improve", "-", "-"]
    usual = {"verdict": "fair", "bound_by": ""}
    for changes, best_ms, sms, words in (
        ({"backend": "standard"}, 0.5, None, "writes the scores"),
        ({}, 1.0, 132, "tensor cores idle"),
        ({"dtype": "bfloat16", "median_ms": 0.01}, 0.01, 9, "too short"),
        ({"dtype": "bfloat16", "seqlen": 64}, 1.0, 132, "too few blocks"),
        ({}, 0.5, None, "use fa4"),
        ({"verdict": "good"}, 1.0, None, "little is left"),
        ({"bound_by": "memory"}, 1.0, None, "fewer key/value heads"),
        ({"seqlen": 64}, 1.0, None, "short sequences"),
        ({}, 1.0, None, "see where the time goes"),
    ):
        best = {"backend": "fa4", "median_ms": best_ms}
        assert words in what_next(row() | usual | changes, best, sms)


def test_a_time_below_the_least_possible_is_not_judged():
    case = Case("sdpa_flash", 4096, heads=8)
    too_low = judge_table(pd.DataFrame([row()]), CEILINGS)
    assert too_low["verdict"].tolist() == ["-"]
    assert "not judged: sdpa_flash" in report(too_low, case, CEILINGS)
    rows = [row("fa2", math.nan, status="failed"), row(ms=30.0)]
    slow = judge_table(pd.DataFrame(rows), CEILINGS)
    assert slow["verdict"].tolist() == ["good", "-"]
    assert "not judged" not in report(slow, case, CEILINGS)


def test_trouble_and_unsteady_times_have_their_advice():
    for status, words in (
        ("out of memory", "--backend sdpa_flash"),
        ("unsupported", "labsupport compare"),
        ("failed", "--report FILE"),
    ):
        assert words in bench.what_helps({"status": status})
    table = pd.DataFrame([row(ms=3000.0, q3_ms=4000.0) | dict.fromkeys(FIGURES, 1.0)])
    table.attrs["provenance"] = {"device": "a CPU"}
    said = bench.report(table, Case("sdpa_flash", 4096, heads=8), CEILINGS)
    assert "abnormally slow" in said
    assert "unsteady" in said


def test_sizes_come_from_the_environment_and_help_says_so():
    sized = {"LABSUPPORT_BATCH": "1", "LABSUPPORT_SEQLEN": "32", "LABSUPPORT_NHEADS": "2"}
    run = CliRunner().invoke(app, ["bench", "--device", "cpu", "--repeats", "3"], env=sized)
    assert "batch 1, 32 tokens, 2 heads" in run.output
    for command in ("bench", "compare", "sweep", "profile"):
        said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert all(name in said for name in sized)


# --- has a call become slower? --------------------------------------------------------------------


def test_a_call_is_slower_only_if_all_processes_say_so():
    assert exceeds([1.06, 1.2, 1.07, 1.3, 1.08], 1.0, 0.05)
    assert not exceeds([1.06, 1.2, 1.07, 1.3, 1.04], 1.0, 0.05)
    assert not exceeds([0.5, 0.6, 0.5, 0.5, 0.5], 1.0, 0.05)


def test_on_a_busy_machine_alarms_are_rare_and_slowdowns_are_caught():
    run = load_run("noise-cpu-busy")
    rows = run[run["case"] == "default"]
    each = (rows.case_ms / rows.reference_ms).groupby(rows.process).median().tolist()
    groups = [each[i : i + PROCESSES] for i in range(0, len(each) - PROCESSES + 1, PROCESSES)]
    for slower, wanted in ((1.0, False), (1.1, True)):
        said = [
            exceeds([ms * slower for ms in now], statistics.median(before), 0.05)
            for before in groups
            for now in groups
            if now is not before
        ]
        assert said.count(wanted) >= 0.95 * len(said)


@pytest.mark.slow
def test_a_baseline_is_measured_in_fresh_processes_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PROCESSES", 1)
    path = tmp_path / "flash.json"
    program("bench", "--seqlen", 64, *SMALL, "--backend", "sdpa_flash", "--save-baseline", path)
    record = json.loads(path.read_text())
    assert record["medians"][0] > 0
    for ratio, slower in ((0.001, True), (1000.0, False)):
        path.write_text(json.dumps(record | {"medians": [ratio]}))
        program("bench", "--check-baseline", path, "--tolerance", 0.05, ok=not slower)
    record["provenance"]["device"] = "x"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="the baseline is of x, and this is"):
        bench.is_slower(path, 0.05)
    for text in ("{}", "not JSON", "[1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"flash\.json is no baseline"):
            bench.is_slower(path, 0.05)
