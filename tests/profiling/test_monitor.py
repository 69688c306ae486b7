"""The sampler inside a program, its recording, and its curve."""

import math
import subprocess
import sys
import time

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from labsupport.plotting import Chart, alt_text
from labsupport.plotting.monitor import plot_monitor
from labsupport.profiling import monitor
from labsupport.profiling.monitoring.processes import ProcessTree, memory_limit
from labsupport.profiling.monitoring.recording import Recording, format_row
from labsupport.profiling.monitoring.sampler import maxrss_bytes, own_peak

MIB = 2**20


def touched(mib):
    """Memory that is really there: one byte of each page is written."""
    block = bytearray(mib * MIB)
    block[::4096] = b"x" * len(range(0, len(block), 4096))
    return block


@pytest.fixture(scope="module")
def watched():
    with monitor(interval=0.02) as watch:
        time.sleep(0.1)
        block = touched(200)
        time.sleep(0.3)
        del block
        time.sleep(0.1)
    return watch


def recorded(*rows, columns=("rss_bytes",)):
    recording = Recording(columns, 0.1)
    for row in rows:
        recording.add(row)
    return recording


# --- the recording --------------------------------------------------------------------------------


def test_the_average_is_over_time_and_not_over_samples():
    # 100 for a second in one gap, then 0: ten hasty samples must not outweigh the first second.
    rows = [(0.0, 100.0), (1.0, 100.0), *((1.0 + i / 10, 0.0) for i in range(1, 11))]
    assert recorded(*rows).mean("rss_bytes") == pytest.approx((100 * 1 + 50 * 0.1) / 2)


def test_what_was_not_read_counts_neither_as_zero_nor_at_all():
    recording = recorded((0.0, 4.0), (1.0, math.nan), (2.0, 8.0))
    assert recording.mean("rss_bytes") == 6.0
    assert recording.peak("rss_bytes") == (2.0, 8.0)
    assert recording.points("rss_bytes") == [(0.0, 4.0), (2.0, 8.0)]


def test_the_largest_gap_tells_how_late_the_sampler_was():
    assert recorded((0.0, 1.0), (0.1, 1.0), (0.7, 1.0), (0.8, 1.0)).largest_gap() == 0.6


def test_a_single_sample_is_its_own_average_and_none_is_no_number():
    assert recorded((0.0, 7.0)).mean("rss_bytes") == 7.0
    assert math.isnan(recorded().mean("rss_bytes"))
    assert math.isnan(recorded().peak("rss_bytes")[1])


def test_a_line_of_csv_has_whole_bytes_and_nothing_for_what_was_not_read():
    columns = ("time_s", "rss_bytes", "pss_bytes", "gpu_power_w", "gpu_throttle")
    line = format_row(columns, (1.23456, 1e12 + 1, math.nan, 71.25, 4.0))
    assert line == "1.235,1000000000001,,71.2,sw_power_cap"


def test_getrusage_counts_kib_on_linux_and_bytes_on_macos():
    assert maxrss_bytes(1000, "linux") == 1_024_000
    assert maxrss_bytes(1000, "darwin") == 1000
    # Python with torch: more than 50 MiB and less than 50 GiB, so the unit is right here too.
    assert 50 * MIB < own_peak() < 50 * 1024 * MIB


# --- the context manager --------------------------------------------------------------------------


def test_the_extra_peak_is_what_the_block_allocated(watched):
    assert watched.extra_peak_bytes == pytest.approx(200 * MIB, abs=20 * MIB + 4 * MIB)
    assert watched.peak_bytes == watched.start_bytes + watched.extra_peak_bytes


def test_the_average_lies_between_start_and_peak_as_the_times_do(watched):
    share = (watched.mean_bytes - watched.start_bytes) / watched.extra_peak_bytes
    assert 0.3 < share < 0.95  # the block is there for about 0.3 s of 0.5 s


def test_the_samples_are_a_table_that_begins_at_the_start(watched):
    samples = watched.samples()
    assert list(samples.columns[:4]) == ["time_s", "processes", "rss_bytes", "pss_bytes"]
    assert samples["time_s"].is_monotonic_increasing
    assert samples["time_s"].iloc[0] < 0.02
    assert samples["time_s"].iloc[-1] > 0.45
    assert len(samples) > 10
    assert samples["rss_bytes"].max() == watched.peak_bytes


def test_the_summary_says_what_samples_cannot_see(watched):
    text = str(watched)
    for part in (
        "peak",
        "above the start",
        "on average",
        "shared pages",
        "largest gap",
        "can miss",
    ):
        assert part in text


def test_the_systems_own_peak_is_told_only_if_the_block_set_it():
    before = own_peak()
    with monitor(interval=0.5) as short:
        pass
    assert short.kernel_peak_bytes is None
    with monitor(interval=5) as blind:
        now = blind.start_bytes
        size = (before - now) // MIB + 100 if before > now else 100
        touched(size)  # freed at once: no sample sees it
    assert blind.extra_peak_bytes < 50 * MIB
    # What the process gave back meanwhile is missing in the peak: half of the spare 100 MiB.
    assert blind.kernel_peak_bytes >= now + (size - 50) * MIB


def test_memory_of_child_processes_is_counted():
    code = "import sys; b = bytearray(60 << 20); b[::4096] = b'x' * (60 << 8); print(1, flush=True)"
    with monitor(interval=0.02) as watch:
        child = subprocess.Popen(
            [sys.executable, "-c", f"{code}; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        child.stdout.readline()
        time.sleep(0.1)
        child.communicate()
    assert 60 * MIB < watch.extra_peak_bytes < 100 * MIB
    assert watch.samples()["processes"].max() == watch.samples()["processes"].iloc[0] + 1
    if sys.platform == "linux":
        assert watch.samples()["pss_bytes"].notna().any()


def test_an_error_in_the_block_passes_through_and_the_samples_stay():
    with pytest.raises(KeyError), monitor(interval=0.01) as watch:
        raise KeyError
    assert watch.peak_bytes > 0
    assert len(watch.samples()) >= 2


def test_wrong_use_is_told():
    with pytest.raises(ValueError, match=r"interval is 0 s; it must be 0\.001 s or more"):
        monitor(interval=0)
    unused = monitor()
    with pytest.raises(RuntimeError, match="nothing is sampled yet"):
        _ = unused.peak_bytes
    with pytest.raises(RuntimeError, match="nothing is sampled yet"):
        _ = unused.mean_bytes
    assert str(unused) == "nothing is sampled yet: use `with monitor() as watch: ...`"
    with unused:
        pass
    with pytest.raises(RuntimeError, match="has been used"):
        unused.__enter__()


def test_importing_the_monitor_imports_no_torch():
    code = (
        "import sys\n"
        "from labsupport.profiling.monitoring.run import run_monitored\n"
        "from labsupport.profiling import monitor\n"
        "print(sorted({'torch', 'pandas', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_process_tree_knows_children_and_grandchildren_and_forgets_the_ended():
    inner = "import sys; sys.stdin.read()"
    outer = (
        f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {inner!r}]);"
        "print(c.pid, flush=True); sys.stdin.read(); c.wait()"
    )
    tree = ProcessTree(count_root=False)
    before = tree.read()[0]
    child = subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    grandchild = int(child.stdout.readline())
    tree.read()
    assert {child.pid, grandchild} <= tree.pids()
    assert tree.read()[0] == before + 2
    child.communicate()
    assert tree.read()[0] == before


def test_the_limit_is_at_most_the_memory_of_the_machine():
    import psutil

    limit, name = memory_limit()
    assert 0 < limit <= psutil.virtual_memory().total
    assert name.startswith("memory")


# --- the curve ------------------------------------------------------------------------------------


def test_the_chart_shows_the_samples_in_their_unit_with_lines_to_judge_by(watched):
    chart = watched.chart()
    axes = chart.axes[0]
    curve = axes.get_lines()[0]
    samples = watched.samples()
    unit = 2**30 if "GiB" in axes.get_ylabel() else MIB
    assert list(curve.get_xdata()) == list(samples["time_s"])
    assert list(curve.get_ydata()) == pytest.approx(list(samples["rss_bytes"] / unit))
    assert "s)" in axes.get_xlabel()
    words = " ".join(text.get_text() for text in axes.get_legend().get_texts())
    assert "at the start" in words
    assert "memory of this machine" in words or "memory limit" in words
    assert "on average" in chart.get_suptitle()
    assert "largest gap" in chart.get_supxlabel()
    assert "can miss" in chart.get_supxlabel()


@pytest.mark.parametrize(("limit", "is_line"), [(250 * MIB, True), (100 * 1024 * MIB, False)])
def test_a_limit_is_a_line_where_it_is_near_and_words_where_it_is_far(limit, is_line):
    samples = pd.DataFrame({"time_s": [0.0, 1.0], "rss_bytes": [50.0 * MIB, 200.0 * MIB]})
    chart = plot_monitor(samples, title="A finding", limit=("memory of a machine", limit))
    axes = chart.axes[0]
    drawn = [line for line in axes.get_lines() if line.get_gid() == "reference"]
    assert [list(line.get_ydata()) for line in drawn] == [[250, 250]] * is_line
    assert axes.get_ylim()[1] < 300
    assert "memory of a machine" in axes.get_legend().get_texts()[-1].get_text()


def test_a_gpu_has_panels_of_its_own_and_is_described():
    samples = pd.DataFrame(
        {
            "time_s": [0.0, 1.0, 2.0],
            "rss_bytes": [1.0 * MIB, 2.0 * MIB, 1.5 * MIB],
            "gpu_tree_bytes": [math.nan] * 3,
            "gpu_used_bytes": [0.0, 3.0 * 2**30, 1.0 * 2**30],
            "gpu_util_percent": [0.0, 90.0, 30.0],
        }
    )
    chart = plot_monitor(samples, title="A finding", gpu_limit=("memory of a GPU", 8.0 * 2**30))
    labels = ["memory (MiB)", "GPU memory (GiB)", "GPU in use (%)"]
    assert [axes.get_ylabel() for axes in chart.axes] == labels
    words = alt_text(chart)
    assert "GPU memory used by everybody: peak 3.0 GiB at 1.0 s, 1.0 GiB at the end" in words
    assert "40% on average" in words
    assert isinstance(chart, Chart)


def test_the_words_stay_inside_the_picture_however_long_they_are():
    samples = pd.DataFrame({"time_s": [0.0, 1.0], "rss_bytes": [1e9, 2e9],
                            "gpu_tree_bytes": [1e9, 9.5 * 2**30]})  # fmt: skip
    chart = plot_monitor(
        samples,
        title="python -c 'import torch; x = torch.ones(10**8); print(x.sum())' and more words: "
        + "at most 1.9 GiB, 1.4 GiB on average" + "x" * 120,
        limit=("memory limit of this container or job", 140.0 * 2**30),
        gpu_limit=("memory of this GPU (NVIDIA H100 80GB HBM3 MIG 1g.10gb)", 140.4 * 2**30),
        start_bytes=1e9,
        small_print="NVIDIA H200, 2026-01-01, " + "how it was sampled, " * 20,
    )  # fmt: skip
    canvas = FigureCanvasAgg(chart)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = [text for axes in chart.axes for text in axes.get_legend().get_texts()]
    texts += chart.texts
    boxes = [text.get_window_extent(renderer) for text in texts]
    assert len(boxes) >= 7
    assert all(box.x0 >= 0 and box.x1 <= chart.bbox.width for box in boxes)
    assert all(box.y0 >= 0 and box.y1 <= chart.bbox.height for box in boxes)


def test_a_number_and_its_unit_stay_on_one_line():
    samples = pd.DataFrame({"time_s": [0.0, 1.0], "rss_bytes": [1e9, 2e9]})
    for length in (58, 62):
        title = f"{'x' * length} at most 2.8 GiB on average"
        lines = plot_monitor(samples, title=title).get_suptitle().split("\n")
        assert any("2.8\N{NO-BREAK SPACE}GiB" in line for line in lines)


@pytest.mark.filterwarnings("error")
def test_a_gpu_that_is_not_used_is_drawn_as_zero():
    samples = pd.DataFrame({"time_s": [0.0], "rss_bytes": [1e9], "gpu_tree_bytes": [0.0]})
    chart = plot_monitor(samples, title="A finding", gpu_limit=("memory of a GPU", 8e9))
    assert chart.axes[1].get_ylim()[0] == 0 < chart.axes[1].get_ylim()[1]
    assert all(axes.get_xlim()[1] > 0 for axes in chart.axes)


def test_a_table_of_something_else_is_refused():
    with pytest.raises(ValueError, match="lack rss_bytes"):
        plot_monitor(pd.DataFrame({"time_s": [0.0]}), title="A finding")
    with pytest.raises(ValueError, match="no sample"):
        plot_monitor(pd.DataFrame({"time_s": [], "rss_bytes": []}), title="A finding")
