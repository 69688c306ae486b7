"""The table of dtype combinations says what really happened, and holds nothing unclear."""

import argparse
import itertools

import pytest
import torch

from benchmarks import dtypes
from benchmarks.__main__ import parser_of
from benchmarks.dtypes import SAFE
from labsupport.attention.registry import FLOAT_DTYPES

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@pytest.fixture(scope="module")
def table():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtypes, "SHAPE", (1, 16, 2, 16))
        return dtypes.measure(parser_of("dtypes").parse_args(["--device", "cpu"]))


def test_every_combination_is_there_without_nan_or_refusals_without_a_reason(table):
    names = [str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES]
    expected = set(itertools.product(names, repeat=3))
    assert len(expected) == 64
    for _, rows in table.groupby("caller"):
        assert set(zip(rows.q, rows.k, rows.v, strict=True)) == expected
    assert {"sdpa", "sdpa in autocast", "sdpa_flash", "standard", SAFE} <= set(table.caller)
    assert set(table.outcome) == {"runs", "refuses"}
    refusals = table[table.outcome == "refuses"]
    assert (refusals.message.str.len() > 40).all()


def test_bare_kernels_run_one_dtype_and_refuse_mixtures(table):
    for name in ("sdpa", "sdpa_flash", "sdpa_math", "standard", "attention"):
        rows = table[table.caller == name]
        uniform = (rows.q == rows.k) & (rows.k == rows.v)
        assert ((rows.outcome == "runs") == uniform).all()
    bare = table[(table.caller == "sdpa_flash") & (table.outcome == "refuses")]
    assert bare.message.str.startswith("RuntimeError: Expected query, key, and value").all()


def test_autocast_casts_in_silence_all_but_float64(table):
    rows = table[table.caller == "sdpa in autocast"]
    double = (rows[["q", "k", "v"]] == "float64").any(axis=1)
    assert (rows[~double].out == "bfloat16").all()
    assert (rows[~double].message == "").all()


@pytest.mark.parametrize("way", [SAFE, '... float64="cast"'])
def test_the_safe_function_refuses_undecided_float64_only_and_never_casts_to_less(table, way):
    rows = table[table.caller == way]
    double = (rows[["q", "k", "v"]] == "float64").any(axis=1)
    refused = double if way == SAFE else double & False
    assert ((rows.outcome == "refuses") == refused).all()
    assert rows[refused].message.str.contains('float64="cast"').all()
    ran = rows[~refused]
    assert (ran.out == ran.q).all()
    for row in ran.itertuples():
        coarsest = max(
            torch.finfo(getattr(torch, dtype)).eps for dtype in (row.out, row.computed_in)
        )
        assert row.error < 4 * coarsest, row  # inputs, weights, sums and the result are rounded
        if way == SAFE:
            assert BYTES[row.computed_in] >= max(BYTES[d] for d in (row.q, row.k, row.v))


def test_the_text_has_a_line_for_each_combination_and_each_message_once(table):
    shown, said = dtypes.show(table, argparse.Namespace()).split("\n\n")
    assert len(shown.split("\n")) == 1 + 2 + 64
    assert "attention: AttentionInputError" in said
    assert len(set(said.split("\n"))) == len(said.split("\n"))
