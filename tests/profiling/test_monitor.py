"""The sampler inside a program, its curve, and the GPU's readings."""

import dataclasses
import math
import time

import pandas as pd
import pytest

from labsupport.plotting import alt_text
from labsupport.plotting.monitor import plot_monitor
from labsupport.profiling import gpu, monitor
from labsupport.profiling.gpu import GpuState, visible_gpus
from labsupport.profiling.monitoring import live_line, mean_over_time, memory_limit, own_peak

MIB = 2**20


@pytest.fixture(scope="module")
def watched():
    with monitor(interval=0.02) as watch:
        time.sleep(0.1)
        block = b"x" * (100 * MIB)
        time.sleep(0.3)
        del block
        time.sleep(0.1)
    return watch


def test_the_average_is_over_time_and_not_over_samples_and_skips_what_was_not_read():
    # 100 for a second in one gap, then 0: ten hasty samples must not outweigh the first second.
    rows = [(0.0, 100.0), (1.0, 100.0), *((1.0 + i / 10, 0.0) for i in range(1, 11))]
    table = pd.DataFrame(rows, columns=["time_s", "x"])
    assert mean_over_time(table, "x") == pytest.approx((100 * 1 + 50 * 0.1) / 2)
    gap = pd.DataFrame({"time_s": [0.0, 1.0, 2.0], "x": [4.0, math.nan, 8.0]})
    assert mean_over_time(gap, "x") == 6.0
    assert mean_over_time(gap[:1], "x") == 4.0


def test_the_samples_show_what_the_block_allocated_from_start_to_end(watched):
    samples = watched.samples()
    extra = watched.peak_bytes - samples["rss_bytes"].iloc[0]
    assert extra == pytest.approx(100 * MIB, abs=24 * MIB)
    share = 1 - (watched.peak_bytes - watched.mean_bytes) / extra
    assert 0.3 < share < 0.95  # the block is there for about 0.3 s of 0.5 s
    assert list(samples.columns[:3]) == ["time_s", "processes", "rss_bytes"]
    assert samples["time_s"].is_monotonic_increasing
    assert samples["time_s"].iloc[0] < 0.02 < 0.45 < samples["time_s"].iloc[-1]
    parts = "peak", "above the start", "on average", "largest gap", "can be missed"
    assert all(part in str(watched) for part in parts)


def test_peak_and_limit_have_the_right_unit():
    assert 50 * MIB < own_peak() < 50 * 1024 * MIB  # Python with torch
    name, limit = memory_limit()
    assert own_peak() < limit
    assert name.startswith("memory")


def test_the_chart_shows_the_samples_with_lines_to_judge_by(watched):
    chart = watched.chart("a program")
    axes = chart.axes[0]
    unit = 2**30 if "GiB" in axes.get_ylabel() else MIB
    curve = axes.get_lines()[0]
    assert list(curve.get_ydata()) == pytest.approx(list(watched.samples()["rss_bytes"] / unit))
    assert "on average" in chart.get_suptitle()
    assert "can be missed" in chart.get_supxlabel()


def test_a_limit_is_a_line_where_it_is_near_and_words_where_it_is_far():
    samples = pd.DataFrame({"time_s": [0.0, 1.0], "rss_bytes": [50.0 * MIB, 200.0 * MIB]})
    for limit, is_line in ((250 * MIB, True), (100 * 1024 * MIB, False)):
        axes = plot_monitor(samples, title="A finding", limit=("a limit", limit)).axes[0]
        drawn = [line for line in axes.get_lines() if line.get_gid() == "reference"]
        assert [list(line.get_ydata()) for line in drawn] == [[250, 250]] * is_line
        assert axes.get_ylim()[1] < 300
        assert "a limit" in axes.get_legend().get_texts()[-1].get_text()


def test_a_gpu_has_panels_of_its_own_and_is_described():
    samples = pd.DataFrame({"time_s": [0.0, 1.0, 2.0], "rss_bytes": [MIB, 2 * MIB, 1.5 * MIB]})
    samples = samples.assign(
        gpu_tree_bytes=0.0, gpu_used_bytes=[0, 3 * 2**30, 2**30], gpu_util_percent=[0, 90, 30]
    )
    chart = plot_monitor(samples, title="A finding", gpu_limit=("of this GPU", 8.0 * 2**30))
    labels = [axes.get_ylabel() for axes in chart.axes]
    assert labels == ["memory (MiB)", "GPU memory (GiB)", "GPU in use (%)"]
    words = alt_text(chart)
    assert "GPU memory of all processes: peak 3.0 GiB at 1.0 s, 1.0 GiB at the end" in words
    assert "Reference: of this GPU: 8.0 GiB" in words
    assert "40% on average" in words


# --- the GPU --------------------------------------------------------------------------------------

BUSY = GpuState(
    index=0, name="NVIDIA H200", busy_percent=98, used_bytes=2 * 2**30, total_bytes=140 * 2**30,
    sm_mhz=1395, max_sm_mhz=1980, memory_mhz=3201, celsius=61, power_w=698.6, reasons=0x4 | 0x1,
    users={10: 500, 11: 70, 99: 4000},
)  # fmt: skip


def test_gpus_are_counted_as_pytorch_counts_them():
    for visible, expected in (
        (None, [0, 1, 2, 3]),
        (" 3 , 1", [3, 1]),
        ("GPU-8932f937", ["GPU-8932f937"]),
        ("", []),
        ("2,-1,3", [2]),
        ("2,4", [2]),
    ):
        assert visible_gpus(4, visible) == expected


def test_only_the_trees_own_processes_count(monkeypatch):
    monkeypatch.setattr(gpu, "foreign_pids", lambda: False)
    assert [BUSY.bytes_of(pids) for pids in ({10, 11, 12}, {12})] == [570, 0]
    assert dataclasses.replace(BUSY, users={10: None, 11: 70}).bytes_of({10, 11}) is None
    monkeypatch.setattr(gpu, "foreign_pids", lambda: True)
    assert BUSY.bytes_of({10}) is None


def test_the_live_line_names_machine_and_gpus(monkeypatch):
    monkeypatch.setattr("labsupport.profiling.monitoring.read_gpus", lambda: [BUSY])
    line = live_line()
    assert "  |  GPU 0 98% in use, 2.0 GiB of 140.0 GiB, SM 1395 of 1980 MHz" in line
    assert line.endswith("699 W, 61 °C, limited by power limit")
    monkeypatch.setattr("labsupport.profiling.monitoring.read_gpus", lambda: [GpuState(1, "a GPU")])
    assert live_line().endswith("GPU 1 not readable here")
