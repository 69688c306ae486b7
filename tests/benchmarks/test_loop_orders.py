"""Version 1 beside version 2: the same results, and their times side by side."""

import pytest

from benchmarks import loop_orders
from benchmarks.__main__ import main, parser_of
from labsupport.attention.kernels import mode

runs_kernels = pytest.mark.skipif(mode.missing() is not None, reason=str(mode.missing()))
SMALL = ["--tokens", "64", "--head-dim", "16", "--max-seconds", "0.01"]


@runs_kernels
def test_both_versions_are_measured_and_agree(monkeypatch):
    monkeypatch.setattr(loop_orders, "FEW", ((2, 2),))
    options = parser_of("loop_orders").parse_args(SMALL)
    table = loop_orders.measure(options)
    assert list(table.version1_programs) == [4, 4]
    assert (table.difference < (1e-5 if mode.interpreted() else 0.05)).all()
    assert table.ratio.tolist() == (table.version1_ms / table.version2_ms).tolist()
    assert table.order_ratio.tolist() == (table.version1_ms / table.same_tiles_ms).tolist()
    assert table.attrs["provenance"]["interpreted"] == mode.interpreted()
    printed = loop_orders.show(table, options)
    assert "1 / same" in printed
    assert ("times mean nothing" in printed) == mode.interpreted()


@runs_kernels
def test_versions_that_disagree_are_not_compared(monkeypatch, capsys):
    from labsupport.attention.kernels import version1

    right = version1.forward_version1
    monkeypatch.setattr(loop_orders, "FEW", ((1, 1),))
    monkeypatch.setattr(
        version1, "forward_version1", lambda *qkv, causal: right(*qkv, causal=not causal)
    )
    main(["loop_orders", *SMALL])
    printed = capsys.readouterr().out
    assert "failed: AssertionError" in printed
    assert "1 / same" not in printed


@pytest.mark.skipif(not mode.interpreted(), reason="compiled, times mean something")
def test_interpreted_times_are_not_kept():
    for program in ("loop_orders", "decode"):
        with pytest.raises(SystemExit, match="not worth keeping"):
            main([program, "--save", "nothing"])
