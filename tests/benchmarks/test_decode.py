"""Decoding beside others: bytes by definition, right results only, ratios out of one run."""

import pytest

from benchmarks import decode as program
from benchmarks.__main__ import parser_of
from benchmarks.decode import DecodeShape
from labsupport.attention.kernels import mode

runs_kernels = pytest.mark.skipif(mode.missing() is not None, reason=str(mode.missing()))
SMALL = "--heads 4 --kv-heads 2 --head-dim 16 --max-seconds 0.01 "


def measure(shapes):
    options = parser_of("decode").parse_args((SMALL + shapes).split())
    table = program.measure(options)
    return table, program.show(table, options)


def test_the_bytes_are_those_of_k_and_v_read_once():
    shape = DecodeShape(batch=8, keys=1000, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    assert shape.cache_bytes == 8 * 1000 * 8 * 128 * 2 * 2


@runs_kernels
def test_every_implementation_is_a_row_and_ratios_are_against_the_fastest_sdpa():
    table, printed = measure("--keys 70,20 --batch 1 --peers sdpa_flash,sdpa_efficient,fa3")
    names = ["decode", "sdpa_flash", "sdpa_efficient", "fa3"]
    assert list(table.implementation) == names * 2
    ran = table[table.status == "ok"]
    assert set(ran.implementation) >= {"decode", "sdpa_flash"}
    assert (ran.relative_error < (1e-5 if mode.interpreted() else 1e-2)).all()
    assert (ran.gb_s * ran.median_ms * 1e6).tolist() == pytest.approx(ran.cache_bytes.tolist())
    assert (ran[ran.implementation == "sdpa_flash"].times_sdpa == 1).all()
    for _, shape in ran.groupby(["batch", "keys"]):
        times = shape.set_index("implementation").median_ms
        ratio = shape.set_index("implementation").times_sdpa["decode"]
        assert ratio == pytest.approx(times["sdpa_flash"] / times["decode"])
    assert "one query, 4 heads over 2" in printed
    assert ("times mean nothing" in printed) == mode.interpreted()
    rows = table.set_index(["keys", "implementation"])
    assert rows.status[20, "sdpa_efficient"] == "unsupported"
    assert "grouped-query heads" in rows.reason[20, "sdpa_efficient"]
    assert "sdpa_efficient: unsupported: " in printed
    assert "unknown backend" in printed


@runs_kernels
def test_a_wrong_result_is_not_timed(monkeypatch):
    """A kernel that is fast because it leaves out half of the keys must not win."""

    def half(q, k, v):
        return right(q, k[:, ::2], v[:, ::2])

    right = program.decode
    monkeypatch.setattr(program, "decode", half)
    table, printed = measure("--keys 20 --batch 1 --peers decode")
    (row,) = table.itertuples()
    assert row.status == "wrong"
    assert row.relative_error > 0.05
    assert "median_ms" not in table
    assert "wrong" in printed
