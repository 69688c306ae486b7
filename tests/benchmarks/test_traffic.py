"""The count beside ncu's: bytes of the lab's kernels, the command line, the CSV, and no ncu."""

import pytest

from benchmarks.__main__ import main
from benchmarks.traffic import compare, kernel_bytes
from labsupport.analysis.nsight import BYTES
from labsupport.profiling.cases import Case

CASE = Case("flash_triton", 4096, batch=4, heads=16, head_dim=128, dtype="bfloat16")


def launch(kernel, *values):
    return {"kernel": kernel, **dict(zip(BYTES, values, strict=False))}


def test_launches_are_compared_with_the_tiling_that_their_kernel_has():
    hopper = kernel_bytes("forward", CASE, 64, 64)
    plain = kernel_bytes("forward", CASE, 128, 64)
    launches = [
        launch("hopper_forward_kernel", hopper.read, hopper.written, hopper.total, 1, 2),
        launch("forward_kernel", plain.read, plain.written, 2 * plain.total, 1, 2),
        launch("elementwise_kernel", 1, 1, 1, 1, 1),
        launch("rows_kernel", 1),
    ]
    table = compare(launches, CASE).set_index("kernel")
    assert list(table.index) == ["hopper_forward_kernel", "forward_kernel", "rows_kernel"]
    assert list(table.moved_ratio[:2]) == [1, 1]
    assert table.l2_ratio["forward_kernel"] == 2
    assert table.dram_ratio["forward_kernel"] == pytest.approx(3 / plain.compulsory)
    assert table.dram_ratio.isna()["rows_kernel"]  # not read


def test_bytes_of_the_forward_kernel_by_hand():
    heads, n, d = 4 * 16, 4096, 128
    tensor = heads * n * d * 2
    got = kernel_bytes("forward", CASE, 64, 64)
    assert got.read == tensor + (n // 64) * 2 * tensor  # Q once, K and V for each block of queries
    assert got.written == tensor + heads * n * 4
    assert got.compulsory == 4 * tensor + heads * n * 4


def test_causal_kernels_ask_for_the_tiles_up_to_the_diagonal():
    causal = Case("x", 256, heads=1, head_dim=64, dtype="float16", causal=True)
    tile = 64 * 64 * 2
    assert kernel_bytes("forward", causal, 64, 64).read == 4 * tile + (1 + 2 + 3 + 4) * 2 * tile
    keys = kernel_bytes("keys", causal, 64, 64)
    assert keys.read == 2 * 4 * tile + 10 * (2 * tile + 2 * 4 * 64)
    queries = kernel_bytes("queries", causal, 128, 64)
    assert queries.read == 2 * 4 * tile + 2 * 4 * 256 + (2 + 4) * 2 * tile


def test_bytes_that_ncu_recorded_on_an_h200_are_the_compulsory_ones_and_fewer_in_the_l2():
    """`data/runs/peers-h200/notes.md`, tiles of 64 x 64: requests are coalesced on their way."""
    for kernel, megabytes in (("forward", 262), ("keys", 391), ("queries", 331), ("rows", 139)):
        compulsory = kernel_bytes(kernel, CASE, 64, 64).compulsory
        assert megabytes * 1e6 / compulsory == pytest.approx(1, abs=0.04), kernel
    for kernel, gigabytes, share in (("forward", 7.35, 0.84), ("keys", 6.84, 0.76)):
        total = kernel_bytes(kernel, CASE, 64, 64).total
        assert gigabytes * 1e9 / total == pytest.approx(share, abs=0.01), kernel


def test_where_ncu_is_missing_the_command_says_so_and_can_be_shown(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))  # an empty folder
    with pytest.raises(SystemExit, match="ncu not found"):
        main(["traffic"])
    with pytest.raises(SystemExit) as end:
        main(["traffic", "--show", "--causal"])
    assert not end.value.code
    shown = capsys.readouterr().out
    assert "--clock-control none" in shown
    assert "causal=True" in shown
    assert "'regex:^(_attn_fwd|" in shown
    assert all(metric in shown for metric in BYTES)


def test_a_csv_that_was_kept_is_compared(capsys, tmp_path):
    path = tmp_path / "kept.csv"
    rows = [["ID", "Kernel Name", *BYTES], ["", "", *["byte"] * 5]]
    rows.append(["0", "hopper_queries_kernel", *["4000000000"] * 5])
    path.write_text("\n".join(",".join(f'"{cell}"' for cell in row) for row in rows))
    assert main(["traffic", "--read", str(path)]) == 0
    assert "hopper_queries_kernel" in capsys.readouterr().out
