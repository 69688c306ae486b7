"""`labsupport monitor`, run as users run it, around real programs."""

import csv
import signal
import subprocess
import sys
from collections import Counter

import pytest

from labsupport.commands.monitor import run_monitored
from tests.fresh import wait_for

MIB = 2**20
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
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [float(row["time_s"]) for row in rows]
    assert times == sorted(times)
    assert times[0] < 0.5 < 1.0 < times[-1]
    assert max(int(row["processes"]) for row in rows) == 2
    # Two interpreters of some 10 MiB, and 50 MiB more in each step, of which one stays.
    levels = Counter(int(row["rss_bytes"]) // (50 * MIB) for row in rows)
    assert all(levels[level] >= 2 for level in (1, 2, 3, 4))
    assert max(levels) == 4
    top = max(range(len(rows)), key=lambda i: int(rows[i]["rss_bytes"]))
    assert any(int(row["rss_bytes"]) < 100 * MIB for row in rows[top:])
    assert chart.read_bytes().startswith(b"\x89PNG")
    for words in ("memory: peak", "on average", "at most 2", "largest process: 2", "can be missed"):
        assert words in done.stderr
    assert f"written: {out}" in done.stderr


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
    assert f"written: {out}" in done.stderr


def test_the_live_view_is_a_line_at_a_time_and_goes_with_a_program(python, capfd):
    main = ["-c", "from labsupport.cli import main; main()"]
    process = python.start(*main, "monitor", "--live", "--interval", "0.01")
    wait_for(lambda: process.read().count("\n") >= 3)
    process.send_signal(signal.SIGINT)
    done = process.finish()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all("CPU" in line and "memory" in line and "\x1b" not in line for line in lines)
    assert run_monitored(["sleep", "0.3"], live=0.1) == 0
    assert capfd.readouterr().err.count("CPU") >= 2
