import math
from dataclasses import asdict, replace

import pandas as pd
import pytest
import torch

from labsupport.attention.reference import standard_attention
from labsupport.profiling import grids
from labsupport.profiling.grids import (
    COLUMNS,
    Case,
    errors_by_dtype,
    grid,
    make_inputs,
    oracle_of_first,
    predicted_shortage,
    refusal,
    run_case,
    run_grid,
)
from labsupport.profiling.tables import (
    arithmetic_bound_ms,
    compare_with_peers,
    geometric_means,
    score_mib,
    speedup,
)

CPU = torch.device("cpu")
QUICK = {"device": "cpu", "max_seconds": 0.0, "progress": False}


def test_a_grid_compares_all_backends_at_one_shape_before_the_next():
    made = grid(["a", "b"], [16, 32], causal=[False, True], heads=2)
    assert [(c.causal, c.seqlen, c.backend, c.heads) for c in made] == [
        (causal, seqlen, backend, 2)
        for causal in (False, True) for seqlen in (16, 32) for backend in "ab"
    ]  # fmt: skip
    for wrong in ({"seqlen": -1}, {"heads": -1}, {"dtype": "float8"}, {"direction": "backward"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Case(**{"backend": "standard", "seqlen": 16} | wrong)
    with pytest.raises(ValueError, match="no such axis: head"):
        grid(["a"], [16], head=2)
    with pytest.raises(ValueError, match="flash_attn3"):
        run_grid([Case("flash_attn3", 16)], **QUICK)


def test_every_case_is_a_row_measured_or_refused_with_its_reasons():
    chosen = grid(
        ["standard", "flash_torch", "sdpa_flash", "sdpa_efficient"], [96], heads=4, kv_heads=2,
        head_dim=16, causal=True, direction=["forward", "forward+backward"],
    )  # fmt: skip
    table = run_grid(chosen, **QUICK)
    assert list(table.columns) == COLUMNS
    assert len(table) == 8
    refused = table[table["backend"] == "sdpa_efficient"]
    assert set(refused["status"]) == {"unsupported"}
    assert refused["reason"].str.contains("cpu", case=False).all()
    rows = table[table["status"] == "ok"]
    assert len(rows) == 6
    assert ((rows["reason"] == "") & (rows["kernel"] != "") & (rows["repeats"] >= 3)).all()
    for low, high in [("min_ms", "q1_ms"), ("q1_ms", "median_ms"), ("median_ms", "q3_ms")]:
        assert (rows[low] <= rows[high]).all()
    first = rows.iloc[0]
    assert first["tflops"] == pytest.approx(4 * 4 * 16 * 96 * 97 / 2 / first["median_ms"] / 1e9)
    assert (rows["relative_error"] < 2e-6).all()
    assert rows["max_error"].between(1e-12, 1e-5).all()
    memory = rows.set_index(["backend", "direction", "seqlen"])["peak_memory_bytes"]
    assert memory["standard", "forward", 96] >= 2 * 4 * 96 * 96 * 4  # its scores
    assert memory["sdpa_flash", "forward", 96] < memory["standard", "forward", 96]


def test_one_case_is_measured_refused_or_not_started():
    for case, status, reason in (
        (Case("sdpa_flash", 4, heads=16, head_dim=8), "ok", ""),  # more heads than tokens
        (Case("sdpa_flash", 32, heads=4, kv_heads=3, head_dim=8), "unsupported", "heads"),
        (Case("standard", 2**20, heads=1, head_dim=8), "out of memory", "predicted: needs "),
    ):
        row = run_case(case, CPU, max_seconds=0.0)
        assert row["status"] == status, row["reason"]
        assert reason in row["reason"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("backend", "direction"), [("standard", "forward"), ("sdpa_math", "forward+backward")]
)
def test_the_predicted_need_is_never_below_the_measured_one(backend, dtype, direction):
    case = Case(backend, 192, heads=2, head_dim=32, dtype=dtype, direction=direction, causal=True)
    row = run_case(case, CPU, repeats=1)
    assert row["status"] == "ok", row["reason"]
    assert predicted_shortage(case, available=row["peak_memory_bytes"] - 1) != ""
    assert predicted_shortage(replace(case, backend="sdpa_flash"), available=2**20) == ""


def test_an_error_in_a_case_becomes_its_status():
    for error, status in (
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (MemoryError(), "out of memory"),
        (NotImplementedError(), "unsupported"),
        (RuntimeError("a bug"), "failed"),
    ):
        assert refusal(error)["status"] == status


def test_an_interrupted_grid_keeps_its_rows(monkeypatch):
    def attention(q, *args, **kwargs):
        if q.shape[1] == 32:
            raise KeyboardInterrupt

    monkeypatch.setattr(grids, "attention", attention)
    table = run_grid(grid(["standard"], [16, 32, 64]), **QUICK)
    assert len(table) == 1
    assert table.attrs["provenance"]["interrupted"] is True


def test_the_oracle_sees_grouped_heads_and_no_error_is_told_for_long_sequences(monkeypatch):
    case = Case("standard", 24, heads=4, kv_heads=2, dtype="float64")
    q, k, v, _ = make_inputs(case, CPU)
    k4, v4 = (t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v))
    out = standard_attention(q.transpose(1, 2), k4, v4)[0].transpose(1, 2)
    torch.testing.assert_close(oracle_of_first(q, k, v, causal=False), out[0])
    assert run_case(case, CPU, measure_error=True, repeats=1)["max_error"] < 1e-14
    monkeypatch.setattr(grids, "ORACLE_TOKENS", 23)
    assert "max_error" not in run_case(case, CPU, measure_error=True, repeats=1)


def test_speedup_compares_within_one_shape():
    rows = [("standard", 16, 8.0), ("flex", 16, 2.0), ("standard", 32, math.nan), ("flex", 32, 2.0)]
    table = pd.DataFrame([asdict(Case(name, n)) | {"median_ms": ms} for name, n, ms in rows])
    table.attrs["provenance"] = {"device": "x"}
    result = speedup(table)
    assert result["speedup"].iloc[:2].tolist() == [1.0, 4.0]
    assert result["speedup"].iloc[2:].isna().all()
    assert result.attrs == table.attrs
    with pytest.raises(ValueError, match="no row of backend 'fa2'"):
        speedup(table, over="fa2")
    with pytest.raises(ValueError, match="one run at a time"):
        speedup(pd.concat([table, table]))


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


def test_peers_are_compared_by_shape_and_pass_and_what_did_not_run_counts_nowhere():
    times = {"ours": [(1.0, 3.0), (1.0, 2.0), (1.0, 3.0)], "theirs": [(4.0, 5.0), (1.0, 1.5)]}
    rows = [
        {"backend": backend, "head_dim": 64, "causal": False, "seqlen": 512 << shape}
        | {"direction": direction, "status": "ok", "median_ms": ms, "tflops": factor * 10 / ms}
        for backend, pairs in times.items()
        for shape, pair in enumerate(pairs)
        for direction, factor, ms in zip(grids.DIRECTIONS, (1, 3.5), pair, strict=True)
    ]
    rows += [rows[-1] | {"seqlen": 2048, "status": "unsupported", "median_ms": math.nan}]
    ratios = compare_with_peers(pd.DataFrame(rows), "ours")
    assert ratios.theirs.fillna(0).tolist() == [4.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    assert ratios["TFLOP/s"].tolist() == pytest.approx([10.0, 12.5, 10.0, 25.0, 10.0, 12.5])
    means = geometric_means(ratios).set_index("pass")
    assert means.loc["forward", ["mean", "smallest"]].tolist() == pytest.approx([2.0, 1.0])


def test_a_raised_ceiling_is_not_said_on_stdout(monkeypatch, capsys):
    monkeypatch.setattr(grids, "raise_beaten", lambda device, reached: "raised")
    run_grid([Case("standard", 16, heads=1, head_dim=8)], **QUICK)
    said = capsys.readouterr()
    assert ("raised" in said.err, said.out) == (True, "")
