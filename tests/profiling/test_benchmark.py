import math
from dataclasses import asdict

import pandas as pd
import pytest
import torch

from labsupport.attention.reference import standard_attention
from labsupport.profiling import benchmark
from labsupport.profiling.accuracy import Oracle, errors_by_dtype
from labsupport.profiling.benchmark import (
    COLUMNS,
    make_inputs,
    predicted_shortage,
    run_case,
    run_grid,
)
from labsupport.profiling.cases import Case, grid
from labsupport.profiling.tables import (
    arithmetic_bound_ms,
    format_table,
    readable,
    score_mib,
    speedup,
)

CPU = torch.device("cpu")
QUICK = {"device": "cpu", "max_seconds": 0.0, "progress": False}


def test_flops_are_two_matrix_products_and_three_and_a_half_times_with_backward():
    case = Case("standard", 100, batch=2, heads=3, head_dim=16)
    assert case.flops() == 4 * 2 * 3 * 100 * 100 * 16
    both = Case("standard", 100, batch=2, heads=3, head_dim=16, direction="forward+backward")
    assert both.flops() == 3.5 * case.flops()
    causal = Case("standard", 100, batch=2, heads=3, head_dim=16, causal=True)
    assert causal.flops() == 4 * 2 * 3 * 5050 * 16


@pytest.mark.parametrize(
    ("field", "value"),
    [("seqlen", 0), ("heads", -1), ("dtype", "float8"), ("direction", "backward")],
)
def test_a_case_that_makes_no_sense_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Case(**{"backend": "standard", "seqlen": 16, field: value})


def test_a_grid_compares_all_backends_at_one_shape_before_the_next():
    cases = grid(["a", "b"], [16, 32], causal=[False, True], heads=2)
    assert len(cases) == 8
    assert [(c.backend, c.seqlen, c.causal) for c in cases[:3]] == [
        ("a", 16, False),
        ("b", 16, False),
        ("a", 32, False),
    ]
    assert {c.heads for c in cases} == {2}


def test_an_unknown_axis_is_named():
    with pytest.raises(ValueError, match="nheads"):
        grid(["a"], [16], nheads=2)


@pytest.fixture(scope="module")
def table():
    cases = grid(
        ["standard", "flash_torch", "sdpa_flash", "sdpa_efficient"],
        [64, 96],
        heads=4,
        kv_heads=2,
        head_dim=16,
        causal=True,
        direction=["forward", "forward+backward"],
    )
    return run_grid(cases, **QUICK)


def test_every_case_is_a_row(table):
    assert list(table.columns) == COLUMNS
    assert len(table) == 16
    assert set(table["status"]) == {"ok", "unsupported"}


def test_a_measured_row_is_consistent(table):
    rows = table[table["status"] == "ok"]
    assert len(rows) == 12
    assert (rows["reason"] == "").all()
    assert (rows["kernel"] != "").all()
    assert (rows["repeats"] >= 3).all()
    for low, high in [("min_ms", "q1_ms"), ("q1_ms", "median_ms"), ("median_ms", "q3_ms")]:
        assert (rows[low] <= rows[high]).all()
    first = rows.iloc[0]
    flops = 4 * 4 * 16 * 64 * 65 / 2
    assert first["tflops"] == pytest.approx(flops / first["median_ms"] / 1e9)
    assert (rows["relative_error"] < 2e-6).all()
    assert rows["max_error"].between(1e-12, 1e-5).all()


def test_textbook_attention_needs_memory_for_its_scores(table):
    memory = table.set_index(["backend", "direction", "seqlen"])["peak_memory_bytes"]
    assert memory["standard", "forward", 96] >= 2 * 4 * 96 * 96 * 4
    assert memory["sdpa_flash", "forward", 96] < memory["standard", "forward", 96]


def test_a_refused_case_is_a_row_with_its_reasons(table):
    rows = table[table["backend"] == "sdpa_efficient"]
    assert set(rows["status"]) == {"unsupported"}
    assert rows["reason"].str.contains("cpu", case=False).all()
    assert rows["median_ms"].isna().all()


def test_the_table_knows_where_it_comes_from(table):
    record = table.attrs["provenance"]
    assert record["device_kind"] == "cpu"
    assert "torch" in record["versions"]
    assert {"date", "device", "commit", "command", "threads"} <= set(record)


def test_more_heads_than_tokens_is_measured_and_heads_that_do_not_divide_are_unsupported():
    row = run_case(Case("sdpa_flash", 4, heads=16, head_dim=8), CPU, max_seconds=0.0)
    assert row["status"] == "ok", row["reason"]
    row = run_case(Case("sdpa_flash", 32, heads=4, kv_heads=3, head_dim=8), CPU)
    assert row["status"] == "unsupported"
    assert row["reason"]


def test_textbook_attention_that_would_not_fit_is_not_even_started():
    row = run_case(Case("standard", 2**20, heads=1, head_dim=8), CPU)
    assert row["status"] == "out of memory"
    assert row["reason"].startswith("predicted: needs ")


def test_only_quadratic_backends_are_predicted_to_need_the_score_matrix():
    needs = {name: predicted_shortage(Case(name, 8192), available=2**29) for name in
             ("standard", "sdpa_math", "flash_torch", "sdpa_flash")}  # fmt: skip
    assert [name for name, reason in needs.items() if reason] == ["standard", "sdpa_math"]


@pytest.mark.parametrize(
    ("backend", "dtype", "direction", "causal"),
    [
        ("standard", "float32", "forward", True),
        ("standard", "bfloat16", "forward+backward", True),
        ("standard", "float32", "forward+backward", False),
        ("sdpa_math", "bfloat16", "forward", False),
        ("sdpa_math", "float32", "forward+backward", True),
        ("sdpa_math", "bfloat16", "forward+backward", False),
    ],
)
def test_the_predicted_need_is_never_below_the_measured_one(backend, dtype, direction, causal):
    case = Case(backend, 256, heads=2, head_dim=32, dtype=dtype, direction=direction, causal=causal)
    row = run_case(case, CPU, max_seconds=0.0)
    assert row["status"] == "ok", row["reason"]
    assert predicted_shortage(case, available=row["peak_memory_bytes"] - 1) != ""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (MemoryError(), "out of memory"),
        (RuntimeError("a bug"), "failed"),
    ],
)
def test_an_error_in_a_case_becomes_its_status(monkeypatch, error, status):
    def broken(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(benchmark, "attention", broken)
    assert run_case(Case("standard", 16), CPU)["status"] == status


def test_an_interrupted_grid_keeps_its_rows(monkeypatch):
    cases = iter(["one", KeyboardInterrupt()])

    def attention(*args: object, **kwargs: object) -> None:
        if isinstance(case := next(cases), KeyboardInterrupt):
            raise case

    monkeypatch.setattr(benchmark, "attention", attention)
    table = run_grid(grid(["standard"], [16, 32, 64]), **QUICK)
    assert len(table) < 3
    assert table.attrs["provenance"]["interrupted"] is True


def test_an_unknown_backend_stops_the_grid_before_it_starts():
    with pytest.raises(ValueError, match="flash_attn3"):
        run_grid([Case("flash_attn3", 16)], **QUICK)


def test_equal_shapes_get_equal_inputs():
    first = make_inputs(Case("standard", 16), CPU, seed=0)
    second = make_inputs(Case("sdpa_flash", 16, direction="forward+backward"), CPU, seed=0)
    other = make_inputs(Case("standard", 16), CPU, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


def test_the_oracle_sees_grouped_heads_and_a_wrong_output():
    q, k, v, _ = make_inputs(Case("standard", 24, heads=4, kv_heads=2, dtype="float64"), CPU, 0)
    k4, v4 = (t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v))
    out = standard_attention(q.transpose(1, 2), k4, v4)[0].transpose(1, 2)
    oracle = Oracle()
    assert oracle.errors("a", q, k, v, out, causal=False)["max_error"] < 1e-14
    wrong = oracle.errors("a", q, k, v, 1.5 * out, causal=False)
    assert wrong["relative_error"] == pytest.approx(0.5)
    assert oracle.errors("b", q, k, v, out, causal=True)["max_error"] > 1e-3


def test_above_the_oracles_length_the_errors_are_empty():
    table = run_grid([Case("standard", 32)], oracle_seqlen=16, **QUICK)
    assert math.isnan(table["max_error"].iloc[0])
    assert table["status"].iloc[0] == "ok"


def test_speedup_compares_within_one_shape():
    rows = [
        {"backend": "standard", "seqlen": 16, "median_ms": 8.0},
        {"backend": "flex", "seqlen": 16, "median_ms": 2.0},
        {"backend": "standard", "seqlen": 32, "median_ms": math.nan},
        {"backend": "flex", "seqlen": 32, "median_ms": 2.0},
    ]
    defaults = vars(Case("standard", 16))
    table = pd.DataFrame([{**defaults, **row, "status": "ok"} for row in rows])
    table.attrs["provenance"] = {"device": "x"}
    result = speedup(table)
    assert result["speedup"].iloc[:2].tolist() == [1.0, 4.0]
    assert result["speedup"].iloc[2:].isna().all()
    assert result.attrs == table.attrs
    with pytest.raises(ValueError, match="no row of backend 'fa2'"):
        speedup(table, over="fa2")
    with pytest.raises(ValueError, match="one run at a time"):
        speedup(pd.concat([table, table]))


def test_the_printed_table_shows_measured_and_refused_rows(table):
    text = format_table(table)
    assert "unsupported:" in text
    assert "flash_torch" in text
    assert "x  " in text  # a speed-up


def test_a_readable_table_has_units_and_no_empty_error_columns():
    table = run_grid(
        grid(["standard"], [32], heads=1, head_dim=8), device="cpu", measure_error=False,
        max_seconds=0.01, progress=False,
    )  # fmt: skip
    shown = readable(speedup(table))
    assert {"tokens", "time, ms", "speed-up", "extra memory, MiB"} <= set(shown.columns)
    assert "max error" not in shown
    assert shown["extra memory, MiB"].iloc[0] == round(
        table["peak_memory_bytes"].iloc[0] / 2**20, 1
    )


def test_errors_grow_as_the_dtype_narrows_and_the_textbook_obeys_its_own_rule():
    table = errors_by_dtype(["standard", "sdpa_flash", "fa2"], seqlen=64, device="cpu")
    assert set(table["backend"]) == {"standard", "sdpa_flash"}
    assert table["ok"].all()
    textbook = table[table["backend"] == "standard"].set_index("dtype")["max error"].astype(float)
    assert textbook["float32"] < textbook["float16"] < textbook["bfloat16"]


def test_reference_lines_follow_the_flops_and_the_formula_of_their_table():
    table = pd.DataFrame([asdict(Case("standard", 64, heads=2, head_dim=8, dtype="float16"))])
    flops = 4 * 2 * 8 * 128 * 128
    assert arithmetic_bound_ms(table, tflops=1e-3)(128) == pytest.approx(flops / 1e9 * 1e3)
    assert score_mib(table)(1024) == 2 * 2 * 2 * 1024**2 / 2**20
    with pytest.raises(ValueError, match="mixes heads"):
        score_mib(pd.concat([table, table.assign(heads=4)]))
