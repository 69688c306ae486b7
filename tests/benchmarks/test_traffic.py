"""The count beside ncu's: bytes of the lab's kernels, the command line, the CSV, and no ncu."""

import pytest

from benchmarks.__main__ import main
from benchmarks.traffic import METRICS, compare, ncu_command, parse_csv
from labsupport.analysis.traffic import kernel_bytes
from labsupport.profiling.cases import Case

CASE = Case("flash_triton", 4096, batch=4, heads=16, head_dim=128, dtype="bfloat16")
HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
    '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def made_csv(launches):
    """What ncu's documentation shows: its own lines, then one metric a line."""
    lines = ["==PROF== Connected to process 7", "a line of the program's", HEADER]
    for number, (kernel, values) in enumerate(launches):
        for name, (value, unit) in values.items():
            start = f'"{number}","7","python3","127.0.0.1","{kernel}","1","7","(128, 1, 1)"'
            lines.append(
                f'{start},"(4096, 1, 1)","0","9.0","Command line profiler metrics",'
                f'"{name}","{unit}","{value}"'
            )
    return "\n".join([*lines, "==PROF== Disconnected from process 7"])


def test_a_csv_is_read_with_separators_and_units_and_other_lines_skipped():
    values = dict.fromkeys(METRICS, ("1,000,000", "byte"))
    values["lts__t_bytes.sum"] = ("7.35", "Gbyte")
    values["gpu__time_duration.sum"] = ("1.04", "msecond")  # not asked for: left out
    (launch,) = parse_csv(made_csv([("hopper_forward_kernel", values)]))
    assert launch["kernel"] == "hopper_forward_kernel"
    assert launch["dram__bytes_read.sum"] == 1e6
    assert launch["lts__t_bytes.sum"] == pytest.approx(7.35e9)
    assert "gpu__time_duration.sum" not in launch


@pytest.mark.parametrize("value", [("n/a", "byte"), ("12", "sector")])
def test_a_value_that_is_no_number_of_bytes_is_refused(value):
    with pytest.raises(ValueError, match="lts__t_bytes"):
        parse_csv(made_csv([("forward_kernel", {"lts__t_bytes.sum": value})]))


def test_without_a_table_the_error_says_what_ncu_said():
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        parse_csv("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission for counters\n")


def test_launches_are_compared_with_the_tiling_that_their_kernel_has():
    def values(to, fro, l2, read, written):
        return dict(zip(METRICS, ((n, "byte") for n in (to, fro, l2, read, written)), strict=True))

    hopper = kernel_bytes("forward", CASE, 64, 64)
    plain = kernel_bytes("forward", CASE, 128, 64)
    launches = [
        ("hopper_forward_kernel", values(hopper.read, hopper.written, hopper.total, 1, 2)),
        ("forward_kernel", values(plain.read, plain.written, 2 * plain.total, 1, 2)),
        ("elementwise_kernel", values(1, 1, 1, 1, 1)),
        ("rows_kernel", values(1, 1, 1, 1, 1)),
    ]
    table = compare(parse_csv(made_csv(launches)), CASE).set_index("kernel")
    assert list(table.index) == ["hopper_forward_kernel", "forward_kernel", "rows_kernel"]
    assert list(table.moved_ratio[:2]) == [1, 1]
    assert table.l2_ratio["forward_kernel"] == 2
    assert table.dram_ratio["forward_kernel"] == pytest.approx(3 / plain.compulsory)


def test_a_metric_that_is_missing_makes_its_ratios_missing():
    table = compare(
        parse_csv(made_csv([("rows_kernel", {"lts__t_bytes.sum": ("5", "byte")})])), CASE
    )
    assert table.moved_ratio.isna().all()
    assert table.l2_ratio.notna().all()


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


def test_grouped_heads_share_what_must_move_but_every_query_head_asks():
    whole = Case("x", 256, heads=4, head_dim=64, dtype="float16")
    grouped = Case("x", 256, heads=4, kv_heads=1, head_dim=64, dtype="float16")
    a, b = (kernel_bytes("forward", case, 64, 64) for case in (whole, grouped))
    assert a.read == b.read
    assert a.compulsory - b.compulsory == 3 * 2 * 256 * 64 * 2


def test_recorded_dram_bytes_of_an_h200_are_the_compulsory_ones_within_four_percent():
    """`data/runs/peers-h200/notes.md`."""
    for kernel, megabytes in (("forward", 262), ("keys", 391), ("queries", 331), ("rows", 139)):
        compulsory = kernel_bytes(kernel, CASE, 64, 64).compulsory
        assert megabytes * 1e6 / compulsory == pytest.approx(1, abs=0.04), kernel


def test_recorded_l2_bytes_are_fewer_than_asked_for_as_requests_are_coalesced():
    """`data/runs/peers-h200/notes.md`, tiles of 64 x 64."""
    shares = {"forward": (7.35, 0.84), "keys": (6.84, 0.76), "queries": (5.71, 0.65)}
    for kernel, (gigabytes, share) in shares.items():
        total = kernel_bytes(kernel, CASE, 64, 64).total
        assert gigabytes * 1e9 / total == pytest.approx(share, abs=0.01), kernel


def test_the_command_leaves_the_clocks_alone_and_asks_for_every_metric():
    words = ncu_command(["python", "x.py"])
    assert words[words.index("--clock-control") + 1] == "none"
    assert words[words.index("--metrics") + 1].split(",") == list(METRICS)
    assert words[-2:] == ["python", "x.py"]


def test_where_ncu_is_missing_the_command_says_so_plainly(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # an empty folder
    with pytest.raises(SystemExit, match="ncu not found"):
        main(["traffic"])


def test_a_csv_that_was_kept_is_compared_and_the_command_is_shown(capsys, tmp_path):
    path = tmp_path / "kept.csv"
    values = dict.fromkeys(METRICS, ("4000000000", "byte"))
    path.write_text(made_csv([("hopper_queries_kernel", values)]))
    assert main(["traffic", "--read", str(path)]) == 0
    assert "hopper_queries_kernel" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["traffic", "--show", "--causal"])
    assert not end.value.code
    shown = capsys.readouterr().out
    assert "causal=True" in shown
    assert "'regex:^(_attn_fwd|" in shown
