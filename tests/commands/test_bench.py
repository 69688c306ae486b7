"""`labsupport bench`, `sweep` and `compare`, run as the program runs them."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from labsupport.cli import app
from labsupport.profiling.bench.bound import bound_of
from labsupport.profiling.bench.compare import RULES, Judged, advice, judge_table
from labsupport.profiling.bench.compare import report as compare_report
from labsupport.profiling.bench.troubles import what_would_fit, why_not
from labsupport.profiling.cases import Case
from labsupport.profiling.hardware import Ceilings

SMALL = ["--batch", 1, "--nheads", 2, "--headdim", 16, "--device", "cpu", "--no-grad"]
CEILINGS = Ceilings("a device", 100.0, {"float32": 2.0, "bfloat16": 50.0})
CPU = torch.device("cpu")


def program(*arguments, status=0):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == status, (done.output, done.exception)
    return done


def test_bench_prints_times_speed_memory_and_the_ceiling():
    said = program(
        "bench", "--seqlen", 64, *SMALL, "--repeats", 5, "--backend", "sdpa_flash"
    ).stdout
    assert "sdpa_flash, forward, batch 1, 64 tokens, 2 heads, head_dim 16, float32" in said
    assert "n=5" in said
    for line in ("kernel", "time     min", "median", "speed    peak", "memory", "ceiling"):
        assert line in said


def test_bench_writes_json_and_csv(tmp_path):
    done = program(
        "bench", "--seqlen", 64, *SMALL, "--repeats", 3, "--json", "-", "--csv", tmp_path / "a.csv"
    )
    written = json.loads(done.stdout)
    assert written["results"][0]["seqlen"] == 64
    assert written["provenance"]["device_kind"] == "cpu"
    assert pd.read_csv(tmp_path / "a.csv").repeats.tolist() == [3]


def test_without_no_grad_the_backward_belongs_to_it():
    small = [option for option in SMALL if option != "--no-grad"]
    assert "forward+backward" in program("bench", "--seqlen", 64, *small, "--repeats", 3).stdout


def test_a_backend_that_cannot_run_says_why_and_what_to_do():
    done = program("bench", "--seqlen", 64, *SMALL, "--backend", "sdpa_cudnn", status=1)
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


def test_compare_names_the_fastest_and_the_leanest():
    said = program("compare", "--seqlen", 64, *SMALL, "--max-seconds", 0.01).stdout
    for name in ("standard", "sdpa_flash", "flash_torch", "fastest", "leanest"):
        assert name in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "--preset", "gpt5"], "gpt2-small"),
        (["bench", "--dtype", "int8"], "int8"),
        (["sweep", "--chart", "time.bmp"], ".png"),
        (["bench", "--check-baseline", "a", "--save-baseline", "b"], "one at a time"),
        (["bench", "--check-baseline", "a", "--tolerance", "5 apples"], "5 apples"),
        (["compare", "--save", "a/b"], "no name for a run"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(arguments, words):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert words in str(done.exception)


def test_the_bound_is_the_slower_of_arithmetic_and_memory():
    long = bound_of(Case("x", 4096, heads=8, head_dim=64), CEILINGS)
    assert long.by == "arithmetic"
    assert long.ms == pytest.approx(4 * 2 * 8 * 4096**2 * 64 / 2e12 * 1e3 / 2 * 1)
    one_query = Case("x", 1, heads=8, kv_seqlen=4096, head_dim=64)
    assert bound_of(one_query, CEILINGS).by == "memory"
    assert bound_of(replace(one_query, dtype="float64"), CEILINGS) is None


def judged(**changes):
    values = {
        "case": Case("sdpa_flash", 4096), "ms": 1.0, "bound": None, "reached": math.nan,
        "best_ms": 1.0, "best_backend": "sdpa_flash", "sms": None,
    }  # fmt: skip
    return Judged(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"case": Case("standard", 4096), "best_ms": 0.5}, "writes the scores"),
        ({"sms": 132, "case": Case("sdpa_flash", 4096, dtype="float32")}, "tensor cores idle"),
        ({"sms": 132, "case": Case("sdpa_flash", 64, dtype="bfloat16")}, "too few blocks"),
        ({"best_ms": 0.5, "best_backend": "fa4"}, "take fa4"),
        ({"reached": 0.7}, "little is left"),
        ({"case": Case("sdpa_flash", 64)}, "short sequences"),
        ({}, "see where the time goes"),
    ],
)
def test_advice_follows_from_the_first_rule_that_applies(changes, words):
    assert words in advice(judged(**changes))


def test_every_rule_of_the_table_can_be_the_one_that_counts():
    assert RULES[-1].applies(judged())


def test_out_of_memory_says_what_would_fit():
    case = Case("standard", 16_384, batch=4, heads=8)
    lines = "\n".join(what_would_fit(case, CPU, available=4 * 2**30))
    assert "--backend sdpa_flash" in lines
    assert "--seqlen" in lines
    row = {"status": "out of memory", "reason": "it was too much"}
    assert why_not(row, case, CPU)[0] == "it was too much"


def test_a_time_below_the_least_possible_is_not_judged():
    case = Case("sdpa_flash", 4096, heads=8)
    row = {
        **vars(case), "status": "ok", "reason": "", "kernel": "k", "median_ms": 1.0, "q1_ms": 1.0,
        "q3_ms": 1.0, "min_ms": 1.0, "mean_ms": 1.0, "max_ms": 1.0, "repeats": 3, "tflops": 30.0,
        "peak_memory_bytes": 1, "max_error": math.nan, "relative_error": math.nan,
    }  # fmt: skip
    too_low = judge_table(pd.DataFrame([row]), case, CEILINGS)
    assert too_low["verdict"].tolist() == ["-"]
    assert "not judged: sdpa_flash" in "\n".join(compare_report(too_low, case, CEILINGS))
    slow = judge_table(pd.DataFrame([row | {"median_ms": 30.0}]), case, CEILINGS)
    assert slow["verdict"].tolist() == ["good"]
    assert "not judged" not in "\n".join(compare_report(slow, case, CEILINGS))
