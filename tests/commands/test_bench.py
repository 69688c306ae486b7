"""`labsupport bench`, `sweep` and `compare`, run as the program runs them."""

import json
import math
import re
from dataclasses import replace

import pandas as pd
import pytest
import torch

from labsupport.profiling import advice
from labsupport.profiling.advice import bound_of, verdict, what_next, what_would_fit, why_not
from labsupport.profiling.bench import compare_report, judge_table
from labsupport.profiling.cases import Case
from labsupport.profiling.hardware import Ceilings
from tests.commands.program import program

SMALL = ["--batch", 1, "--nheads", 2, "--headdim", 16, "--device", "cpu", "--no-grad"]
CEILINGS = Ceilings("a device", 100.0, {"float32": 2.0, "bfloat16": 50.0})
CPU = torch.device("cpu")


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
    monkeypatch.setattr("labsupport.profiling.bench.measurable_backends", lambda device: names)
    done = program("compare", "--seqlen", 32, *SMALL, "--repeats", 4, "--json", "-")
    for name in (*names, "fastest", "leanest", "of ceiling"):
        assert name in done.stderr
    assert [row["repeats"] for row in json.loads(done.stdout)["results"]] == [4, 4, 4]
    for name in names:  # the progress bar names the backend at work
        assert re.search(rf"case(/s)?, {name}, 32 tokens\]", done.stderr)


def test_the_bound_is_the_slower_of_arithmetic_and_memory():
    long = bound_of(Case("x", 4096, heads=8, head_dim=64), CEILINGS)
    assert long[:2] == (pytest.approx(4 * 8 * 4096**2 * 64 / 2e12 * 1e3), "arithmetic")
    one_query = Case("x", 1, heads=8, kv_seqlen=4096, head_dim=64)
    assert bound_of(one_query, CEILINGS).by == "memory"
    assert bound_of(replace(one_query, dtype="float64"), CEILINGS) is None


def test_verdicts_and_advice_follow_from_the_first_rule_that_applies():
    shares = (0.51, 0.26, 0.24, 1.2, math.nan)
    assert [verdict(share) for share in shares] == ["good", "fair", "to improve", "-", "-"]
    usual = {"ms": 1.0, "share": math.nan, "bound_by": "", "best": (1.0, "x"), "sms": None}
    for case, changes, words in (
        (Case("standard", 4096), {"best": (0.5, "x")}, "writes the scores"),
        (Case("sdpa_flash", 4096, dtype="float32"), {"sms": 132}, "tensor cores idle"),
        (Case("sdpa_flash", 4096, dtype="bfloat16"), {"sms": 9, "ms": 0.01}, "too short"),
        (Case("sdpa_flash", 64, dtype="bfloat16"), {"sms": 132}, "too few blocks"),
        (Case("sdpa_flash", 4096), {"best": (0.5, "fa4")}, "use fa4"),
        (Case("sdpa_flash", 4096), {"share": 0.7}, "little is left"),
        (Case("sdpa_flash", 4096), {"bound_by": "memory"}, "fewer key/value heads"),
        (Case("sdpa_flash", 64), {}, "short sequences"),
        (Case("sdpa_flash", 4096), {}, "see where the time goes"),
    ):
        assert words in what_next(case, **usual | changes)


def test_out_of_memory_says_what_would_fit():
    case = Case("standard", 16_384, batch=4, heads=8)
    lines = "\n".join(what_would_fit(case, 4 * 2**30))
    assert "--backend sdpa_flash" in lines
    assert "--seqlen 2048" in lines
    assert "nothing like it" in what_would_fit(case, 10)[0]


def test_trouble_and_abnormal_times_have_their_advice():
    for status, reason, words in (
        ("out of memory", "it was too much", "free: "),
        ("failed", "ImportError: undefined symbol: _ZN", "another PyTorch"),
        ("unsupported", "flash-attn is not installed", "labsupport doctor"),
        ("failed", "InductorError: no g++", "needs none"),
        ("failed", "RuntimeError: a bug", "--report"),
    ):
        first, *rest = why_not({"status": status, "reason": reason}, Case("fa2", 512), CPU)
        assert first == reason
        assert words in rest[0]
    row = {"median_ms": 10.0, "q1_ms": 8.0, "q3_ms": 12.0}
    lines = advice.why_slow(row, Case("standard", 512), CPU, 0.01)
    assert "for reading" in lines[0]
    assert "unsteady" in lines[1]
    assert advice.why_slow(row | {"q3_ms": 8.0}, Case("x", 512), CPU, math.nan) == []


def test_a_time_below_the_least_possible_is_not_judged():
    case = Case("sdpa_flash", 4096, heads=8)
    row = {
        **vars(case), "status": "ok", "reason": "", "kernel": "k", "median_ms": 1.0, "q1_ms": 1.0,
        "q3_ms": 1.0, "tflops": 30.0, "peak_memory_bytes": 1,
    }  # fmt: skip
    too_low = judge_table(pd.DataFrame([row]), case, CEILINGS)
    assert too_low["verdict"].tolist() == ["-"]
    assert "not judged: sdpa_flash" in compare_report(too_low, case, CEILINGS)
    slow = judge_table(pd.DataFrame([row | {"median_ms": 30.0}]), case, CEILINGS)
    assert slow["verdict"].tolist() == ["good"]
    assert "not judged" not in compare_report(slow, case, CEILINGS)
