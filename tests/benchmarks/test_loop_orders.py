"""Version 1 beside version 2: the same results, and their times side by side."""

import pytest
import torch

from benchmarks import loop_orders
from benchmarks.__main__ import main, parser_of
from benchmarks.loop_orders import version1_tiling
from labsupport.attention.kernels import mode
from labsupport.attention.kernels.config import KernelConfig, tiling

runs_kernels = pytest.mark.skipif(mode.missing() is not None, reason=str(mode.missing()))
SMALL = ["--tokens", "128", "--head-dim", "16", "--max-seconds", "0.01"]


@pytest.fixture(autouse=True)
def two_shapes(monkeypatch):
    monkeypatch.setattr(loop_orders, "BATCH_HEADS", loop_orders.FEW)


def test_same_tiles_are_those_that_version_one_takes():
    plan = tiling("forward", 64, torch.bfloat16, interpreted=False)
    assert version1_tiling(plan) == KernelConfig(64, 64, plan.warps, 1)


@runs_kernels
def test_both_versions_are_measured_and_agree():
    options = parser_of("loop_orders").parse_args(SMALL)
    table = loop_orders.measure(options)
    assert set(table.batch * table.seqlen) == {128}
    assert list(table.version1_programs) == [1, 4, 1, 4]
    block = tiling("forward", 16, torch.bfloat16, mode.interpreted()).block_q
    assert list(table.version2_programs) == [n * -(-t // block) for n, t in [(1, 128), (4, 64)] * 2]
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
    monkeypatch.setattr(
        version1, "forward_version1", lambda *qkv, causal: right(*qkv, causal=not causal)
    )
    main(["loop_orders", *SMALL])
    printed = capsys.readouterr().out
    assert "failed: AssertionError" in printed
    assert "1 / same" not in printed


@pytest.mark.skipif(not mode.interpreted(), reason="compiled, times mean something")
@pytest.mark.parametrize("program", ["loop_orders", "decode"])
def test_interpreted_times_are_not_kept(program):
    with pytest.raises(SystemExit, match="not worth keeping"):
        main([program, "--save", "nothing"])
