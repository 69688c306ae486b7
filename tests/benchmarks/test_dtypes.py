"""The table of dtype combinations says what really happened, and holds nothing unclear."""

import itertools

import pytest

from benchmarks import dtypes
from benchmarks.__main__ import parser_of
from labsupport.attention.implementations import FLOAT_DTYPES


@pytest.fixture(scope="module")
def table():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtypes, "SHAPE", (1, 4, 1, 8))
        return dtypes.measure(parser_of("dtypes").parse_args(["--device", "cpu"]))


@pytest.mark.slow
def test_every_combination_runs_or_is_refused_with_a_reason_and_bare_kernels_run_one_dtype(table):
    names = [str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES]
    for caller, rows in table.groupby("caller"):
        combinations = list(zip(rows.q, rows.k, rows.v, strict=True))
        assert sorted(combinations) == sorted(itertools.product(names, repeat=3))
        ran = rows[rows.outcome == "runs"]
        if caller in ("sdpa", "sdpa_flash", "sdpa_math", "standard", "attention"):
            assert list(zip(ran.q, ran.k, ran.v, strict=True)) == [(name,) * 3 for name in names]
        if caller == "sdpa in autocast":  # casts all but float64, in silence
            narrow = rows[(rows[["q", "k", "v"]] != "float64").all(axis=1)]
            assert ((narrow.out == "bfloat16") & (narrow.message == "")).all()
    assert set(table.outcome) == {"runs", "refuses"}
    assert (table[table.outcome == "refuses"].message.str.len() > 40).all()
    shown, said = dtypes.show(table, None).split("\n\n")
    assert len(shown.split("\n")) == 1 + 2 + 64
    assert "attention: AttentionInputError" in said
