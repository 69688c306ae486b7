"""`labsupport monitor`, run as users run it, around real programs."""

import signal
import subprocess
import sys
from collections import Counter

import pandas as pd
import psutil
import pytest

from labsupport.commands import monitor
from labsupport.commands.monitor import run_monitored
from labsupport.plotting.charts import plot_samples
from labsupport.profiling.gpu import GpuState
from tests.fresh import wait_for

STEPS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.6)"])
kept = []
for _ in range(4):
    kept.append(b"x" * (50 << 20))
    time.sleep(0.2)
del kept[1:]
time.sleep(0.3)
"""
STUBBORN = """
import signal, sys, time
def handler(number, frame):
    print("noted", flush=True)
    time.sleep(0.4)
    print("tidied", flush=True)
    sys.exit(5)
signal.signal(signal.SIGINT, handler)
print("ready", flush=True)
time.sleep(60)
"""


def around(code, **options):
    """The arguments of a Python that monitors a program of this code."""
    named = [f"--{name}={value}" for name, value in options.items()]
    monitor = ["-c", "from labsupport.cli import main; main()", "monitor", *named]
    return [*monitor, "--", sys.executable, "-c", code]


def test_the_samples_follow_the_program_and_its_child(python, tmp_path):
    out, chart = tmp_path / "memory.csv", tmp_path / "memory.png"
    done = python(*around(STEPS, interval=0.03, out=out, chart=chart))
    assert done.returncode == 0
    table = pd.read_csv(out)
    assert list(table.columns) == ["time_s", "used_mib", "free_mib"]
    assert table["time_s"].is_monotonic_increasing
    assert table["time_s"].iloc[0] < 0.5 < 1.0 < table["time_s"].iloc[-1]
    # Two interpreters of some 10 MiB, and 50 MiB more in each step, of which one stays.
    levels = Counter(table["used_mib"] // 50)
    assert all(levels[level] >= 2 for level in (1, 2, 3, 4))
    assert max(levels) == 4
    assert table["used_mib"].iloc[table["used_mib"].idxmax() :].min() < 100
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert f"memory: peak {table['used_mib'].max():,.0f} MiB after" in done.stderr
    assert f"{table['used_mib'].mean():,.0f} MiB on average" in done.stderr


def test_the_chart_shows_the_whole_run_and_a_panel_for_the_gpu():
    seconds = [0.0, 30.0, 60.0]
    table = pd.DataFrame({"time_s": seconds, "used_mib": [1.0, 900.0, 50.0], "free_mib": 1000.0})
    chart = plot_samples(table, title="A program")
    (axes,) = chart.axes
    assert axes.get_xlim()[1] >= 60
    curve, limit = axes.get_lines()
    assert list(curve.get_ydata()) == [1, 900, 50]
    assert list(limit.get_ydata()) == [1000, 1000]
    gpu = table.assign(gpu_used_mib=2.0, gpu_free_mib=80_000.0)
    labels = [axes.get_ylabel() for axes in plot_samples(gpu, title="A program").axes]
    assert labels == ["memory (MiB)", "GPU memory (MiB)"]


def test_streams_options_and_exit_status_are_the_programs():
    code = (
        "import sys; sys.stdout.write(sys.stdin.read().upper() + str(sys.argv[1:]));"
        "print('e', file=sys.stderr); sys.exit(3)"
    )
    command = [sys.executable, *around(code), "--out", "x", "--", "-h"]
    done = subprocess.run(command, input="line\n", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "LINE\n['--out', 'x', '--', '-h']")
    lines = [s for s in done.stderr.splitlines() if not s.startswith("labsupport monitor: ")]
    assert lines == ["e"]
    assert "ended with status 3" in done.stderr


def test_no_file_is_overwritten_and_nothing_runs_before_that_is_known(tmp_path):
    out, ran = tmp_path / "memory.csv", tmp_path / "ran"
    out.write_text("mine")
    for error, message, options in (
        (FileExistsError, "choose another name", {"out": out}),
        (ValueError, r"\.png", {"chart": tmp_path / "chart.jpeg"}),
        (FileNotFoundError, "no folder", {"out": tmp_path / "none" / "memory.csv"}),
    ):
        with pytest.raises(error, match=message):
            run_monitored(["touch", str(ran)], **options)
    assert (ran.exists(), out.read_text()) == (False, "mine")


def test_control_c_reaches_the_program_first_and_then_the_files_are_written(python, tmp_path):
    out = tmp_path / "memory.csv"
    process = python.start(*around(STUBBORN, out=out))
    wait_for(lambda: process.read() == "ready\n")
    process.send_signal(signal.SIGINT)
    done = process.finish()
    assert done.stdout.split() == ["ready", "noted", "tidied"]  # once: the signal came to it once
    assert done.returncode == 5
    assert len(pd.read_csv(out)) >= 2


def test_the_live_view_is_a_line_at_a_time(python):
    main = ["-c", "from labsupport.cli import main; main()"]
    process = python.start(*main, "monitor", "--live", "--interval", "0.01")
    wait_for(lambda: process.read().count("\n") >= 3)
    process.send_signal(signal.SIGINT)
    done = process.finish()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")[:3]
    assert all("CPU" in line and "memory" in line and "\x1b" not in line for line in lines)


BUSY = GpuState(
    index=0, name="NVIDIA H200", busy_percent=98, used_bytes=2 * 2**30, total_bytes=140 * 2**30,
    sm_mhz=1395, max_sm_mhz=1980, power_w=698.6, reasons=0x4 | 0x1,
)  # fmt: skip


def test_the_live_line_and_the_samples_name_the_gpu(monkeypatch):
    monkeypatch.setattr(monitor, "read_gpus", lambda: [BUSY])
    line = monitor.live_line()
    assert "  |  GPU 0 98% in use, 2.0 GiB of 140.0 GiB, SM 1395 of 1980 MHz, 699 W" in line
    assert line.endswith("limited by power limit")
    row = monitor.sample(psutil.Process(), device=0)
    assert (row["gpu_used_mib"], row["gpu_free_mib"]) == (2 * 1024, 138 * 1024)
    monkeypatch.setattr(monitor, "read_gpus", lambda: [GpuState(1, "a GPU")])
    assert monitor.live_line().endswith("GPU 1 not readable here")
    assert set(monitor.sample(psutil.Process(), device=0)) == {"used_mib", "free_mib"}
