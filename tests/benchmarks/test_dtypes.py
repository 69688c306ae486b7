"""The table of dtype combinations says what really happened, and holds nothing unclear."""

import itertools

import pytest
import torch

from benchmarks import dtypes
from benchmarks.__main__ import parser_of
from benchmarks.dtypes import CAST, SAFE
from labsupport.attention.registry import FLOAT_DTYPES


@pytest.fixture(scope="module")
def table():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtypes, "SHAPE", (1, 4, 1, 8))
        return dtypes.measure(parser_of("dtypes").parse_args(["--device", "cpu"]))


def test_every_combination_is_there_without_nan_or_refusals_without_a_reason(table):
    names = [str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES]
    expected = set(itertools.product(names, repeat=3))
    assert len(expected) == 64
    for _, rows in table.groupby("caller"):
        assert set(zip(rows.q, rows.k, rows.v, strict=True)) == expected
    assert set(table.outcome) == {"runs", "refuses"}
    assert (table[table.outcome == "refuses"].message.str.len() > 40).all()
    shown, said = dtypes.show(table, None).split("\n\n")
    assert len(shown.split("\n")) == 1 + 2 + 64
    assert "attention: AttentionInputError" in said


def test_bare_kernels_run_one_dtype_and_refuse_mixtures(table):
    for name in ("sdpa", "sdpa_flash", "sdpa_math", "standard", "attention"):
        rows = table[table.caller == name]
        uniform = (rows.q == rows.k) & (rows.k == rows.v)
        assert ((rows.outcome == "runs") == uniform).all()
    bare = table[(table.caller == "sdpa_flash") & (table.outcome == "refuses")]
    assert bare.message.str.startswith("RuntimeError: Expected query, key, and value").all()


def test_autocast_casts_in_silence_all_but_float64(table):
    rows = table[table.caller == "sdpa in autocast"]
    rows = rows[(rows[["q", "k", "v"]] != "float64").all(axis=1)]
    assert (rows.out == "bfloat16").all()
    assert (rows.message == "").all()


@pytest.mark.parametrize("way", [SAFE, CAST])
def test_the_safe_function_refuses_undecided_float64_only_and_never_casts_to_less(table, way):
    rows = table[table.caller == way]
    double = (rows[["q", "k", "v"]] == "float64").any(axis=1)
    refused = double if way == SAFE else double & False
    assert ((rows.outcome == "refuses") == refused).all()
    assert rows[refused].message.str.contains('float64="cast"').all()
    ran = rows[~refused]
    assert (ran.out == ran.q).all()
    for row in ran.itertuples():
        out, computed_in, *given = (
            getattr(torch, name) for name in (row.out, row.computed_in, row.q, row.k, row.v)
        )
        coarsest = max(torch.finfo(out).eps, torch.finfo(computed_in).eps)
        assert row.error < 4 * coarsest, row  # inputs, weights, sums and the result are rounded
        if way == SAFE:
            assert computed_in.itemsize >= max(dtype.itemsize for dtype in given)
