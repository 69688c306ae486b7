"""`labsupport monitor`, run as users run it, around real programs."""

import csv
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest
from typer.testing import CliRunner

from labsupport.cli import app
from labsupport.commands.monitor import run_monitored

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
DEAF = """
import signal, time
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


def arguments(*command, **options):
    named = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "labsupport.cli", "monitor", *named, "--", *map(str, command)]


def python(code, **options):
    return arguments(sys.executable, "-c", code, **options)


def run(args, **options):
    return subprocess.run(args, capture_output=True, text=True, timeout=60, **options)


def start(args):
    """A monitor without a terminal, whose program has printed its first line."""
    process = subprocess.Popen(
        args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def is_gone(pid, seconds=5):
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not psutil.pid_exists(pid)


def test_the_samples_follow_the_program_and_its_child(tmp_path):
    out, chart = tmp_path / "memory.csv", tmp_path / "memory.png"
    done = run(python(STEPS, interval=0.03, out=out, chart=chart))
    assert done.returncode == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [float(row["time_s"]) for row in rows]
    assert times == sorted(times)
    assert times[0] < 0.1 < 1.0 < times[-1]
    assert max(int(row["processes"]) for row in rows) == 2
    sizes = [int(row["rss_bytes"]) for row in rows]
    settled = sizes[-4]  # the last samples may see it take itself down
    assert max(sizes) - settled == pytest.approx(150 * MIB, abs=30 * MIB)
    levels = Counter(round((size - settled) / (50 * MIB)) for size in sizes)
    assert all(levels[level] >= 2 for level in (0, 1, 2, 3))
    assert chart.read_bytes().startswith(b"\x89PNG")
    for words in ("memory: peak", "on average", "at most 2", "largest process: 2", "can be missed"):
        assert words in done.stderr
    assert f"written: {out}" in done.stderr


def test_streams_options_and_exit_status_are_the_programs(tmp_path):
    code = (
        "import sys; sys.stdout.write(sys.stdin.read().upper() + str(sys.argv[1:]));"
        "print('e', file=sys.stderr); sys.exit(3)"
    )
    done = run([*python(code), "--out", "x", "--", "-h"], input="line\n")
    assert (done.returncode, done.stdout) == (3, "LINE\n['--out', 'x', '--', '-h']")
    lines = [s for s in done.stderr.splitlines() if not s.startswith("labsupport monitor: ")]
    assert lines == ["e"]
    assert "ended with status 3" in done.stderr
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run(python(killed)).returncode == 128 + 9


def test_a_command_that_is_not_there_is_status_127_and_one_that_cannot_run_126(tmp_path, capsys):
    out, script = tmp_path / "memory.csv", tmp_path / "script"
    script.write_text("no program")
    assert run_monitored(["no-such-program-here"], out=out) == 127
    assert run_monitored([str(script)], out=out) == 126
    assert "command not found: no-such-program-here" in capsys.readouterr().err
    assert not out.exists()


def test_files_are_not_overwritten_unless_asked_and_nothing_runs_before_that_is_known(tmp_path):
    out, ran = tmp_path / "memory.csv", tmp_path / "ran"
    out.write_text("mine")
    with pytest.raises(FileExistsError, match="--force"):
        run_monitored(["touch", str(ran)], out=out)
    with pytest.raises(ValueError, match=r"\.png"):
        run_monitored(["touch", str(ran)], chart=tmp_path / "chart.jpeg")
    with pytest.raises(FileNotFoundError, match="no folder"):
        run_monitored(["touch", str(ran)], out=tmp_path / "none" / "memory.csv")
    assert (ran.exists(), out.read_text()) == (False, "mine")
    assert run_monitored(["touch", str(ran)], out=out, force=True) == 0
    assert out.read_text().startswith("time_s,")


def test_control_c_reaches_the_program_first_and_then_the_files_are_written(tmp_path):
    out = tmp_path / "memory.csv"
    process, first = start(python(STUBBORN, out=out))
    assert first == "ready"
    process.send_signal(signal.SIGINT)
    said, summary = process.communicate(timeout=60)
    assert said.split() == ["noted", "tidied"]  # once: the signal came to it once
    assert process.returncode == 5
    assert f"written: {out}" in summary


@pytest.mark.parametrize(("signals", "grace"), [(3, 30), (1, 0.2)])
def test_a_program_that_ignores_signals_is_ended(signals, grace, monkeypatch):
    # The third signal ends it immediately, the first after its grace and SIGTERM's.
    code = DEAF if signals == 3 else DEAF.replace(", signal.SIGTERM", ",")
    process, _ = start(python(code, grace=grace))
    program = psutil.Process(process.pid).children()[0].pid
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    process.communicate(timeout=60)
    assert process.returncode == 128 + (signal.SIGKILL if signals == 3 else signal.SIGTERM)
    assert is_gone(program)


def test_what_the_program_leaves_running_is_ended():
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],\n"
        "                     start_new_session=True)\n"
        "print(p.pid, flush=True); time.sleep(0.3)\n"
    )
    done = run(python(code, interval=0.02))
    assert done.returncode == 0
    assert "left 1 processes running" in done.stderr
    assert is_gone(int(done.stdout))


def test_at_a_terminal_the_program_reads_the_keyboard_and_control_c_comes_once():
    pid, terminal = pty.fork()
    if pid == 0:
        code = "print(input('name? ').upper(), flush=True)\n" + STUBBORN
        os.execv(sys.executable, python(code))
    said = b""

    def read_until(text):
        nonlocal said
        deadline = time.monotonic() + 20
        while text not in said and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    said += os.read(terminal, 4096)
                except OSError:  # the other end is closed
                    return

    read_until(b"name? ")
    os.write(terminal, b"ada\n")
    read_until(b"ready")
    os.write(terminal, b"\x03")
    read_until(b"can be missed")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert b"ADA" in said
    assert said.count(b"noted") == 1
    assert b"tidied" in said
    assert os.waitstatus_to_exitcode(status) == 5


def test_the_live_view_is_a_line_at_a_time_and_goes_with_a_program():
    done = CliRunner().invoke(app, ["monitor", "--live", "--count", "3", "--interval", "0.01"])
    lines = done.stdout.splitlines()
    assert (done.exit_code, len(lines)) == (0, 3)
    assert all("CPU" in line and "memory" in line and "\x1b" not in line for line in lines)
    args = python("import time; time.sleep(0.3)", interval=0.1)
    args.insert(args.index("--"), "--live")
    assert run(args).stderr.count("CPU") >= 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "which program"),
        (["--live", "--out", "x.csv"], "give one after --"),
        (["--count", "2", "--", "true"], "without a program"),
        (["--live", "--interval", "0"], "0.001 s or more"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options, words):
    done = CliRunner().invoke(app, ["monitor", *options])
    assert words in str(done.exception)
