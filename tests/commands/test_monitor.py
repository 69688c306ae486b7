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

from labsupport.profiling.monitoring.run import run_monitored

MIB = 2**20
STEPS = """
import time
kept = []
for _ in range(4):
    block = bytearray(50 << 20)
    block[::4096] = b"x" * len(range(0, len(block), 4096))
    kept.append(block)
    time.sleep(0.2)
del kept[1:], block
time.sleep(0.3)
"""
FAMILY = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(0.4)"]
time.sleep(0.2)
children = [subprocess.Popen(sleep) for _ in range(3)]
for child in children: child.wait()
time.sleep(0.3)
"""
STUBBORN = """
import signal, sys, time
def handler(number, frame):
    print("noted", flush=True)
    time.sleep(0.7)
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
# The watch, but each sample waits until the program has ended (and leaves it to be collected).
LATE = """
import os, pathlib, sys
from labsupport.profiling.monitoring import run

class Late(run.ProcessTree):
    def read(self):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return super().read()

run.ProcessTree = Late
out, chart = map(pathlib.Path, sys.argv[1:])
sys.exit(run.run_monitored(["true"], out=out, chart=chart))
"""
# A grandchild in a session of its own, whose parent is gone.
ORPHAN = """
import subprocess, sys, time
inner = "import time; time.sleep(60)"
code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {inner!r}]," \\
       " start_new_session=True); print(p.pid, flush=True)"
subprocess.run([sys.executable, "-c", code])
"""


def arguments(*command, **options):
    named = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "labsupport.cli", "monitor", *named, "--", *map(str, command)]


def python(code, **options):
    return arguments(sys.executable, "-c", code, **options)


def run(args, **options):
    return subprocess.run(args, capture_output=True, text=True, timeout=60, **options)


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def start(args):
    """A monitor without a terminal, whose program has said its first line."""
    process = subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    first = process.stdout.readline().strip()
    return process, first


def finish(process):
    """What it said, once it has ended."""
    out, err = process.communicate(timeout=60)
    return out, err, process.returncode


def wait_until_gone(pid, seconds=5):
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not psutil.pid_exists(pid)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A program that takes 200 MiB in four steps: what was said of it, and the CSV."""
    out = tmp_path_factory.mktemp("steps") / "memory.csv"
    return run(python(STEPS, interval=0.03, out=out)), out


def test_the_peak_is_what_the_program_allocated(steps):
    done, out = steps
    assert done.returncode == 0
    sizes = [int(row["rss_bytes"]) for row in rows(out)]
    assert 200 * MIB < max(sizes) < 200 * MIB * 1.1 + 20 * MIB  # 200 MiB and the interpreter
    # Of its four blocks it gives three back.  The last samples may see it take itself down.
    settled = sizes[-4]
    assert max(sizes) - settled == pytest.approx(150 * MIB, abs=15 * MIB + 4 * MIB)
    levels = Counter(round((size - settled) / (50 * MIB)) for size in sizes)
    assert all(levels[level] >= 2 for level in (0, 1, 2, 3))  # it stays on each for 0.2 s


def test_the_summary_names_peak_average_gap_cost_and_what_is_missed(steps):
    done, _ = steps
    peak = next(line for line in done.stderr.splitlines() if "memory: peak" in line)
    assert "on average" in peak
    assert "counts shared pages more than once" in peak
    assert "the system's own peak of its largest single process: 2" in done.stderr
    assert "largest gap 0." in done.stderr
    assert "% of a core" in done.stderr
    assert "can miss" in done.stderr


def test_children_that_come_and_go_are_counted(tmp_path):
    out = tmp_path / "memory.csv"
    done = run(python(FAMILY, interval=0.05, out=out))
    counts = [int(row["processes"]) for row in rows(out)]
    assert max(counts) == 4
    # One at the start and at the end; none when the last sample meets it ending.
    assert counts[0] == 1
    assert counts[-1] <= 1
    assert "processes: 4 at once at most, 4 seen in all" in done.stderr
    if sys.platform == "linux":
        assert any(row["pss_bytes"] for row in rows(out))


def test_the_header_has_units_and_the_time_grows(tmp_path):
    out = tmp_path / "memory.csv"
    run(arguments("sleep", "0.3", interval=0.05, out=out))
    found = rows(out)
    assert list(found[0])[:4] == ["time_s", "processes", "rss_bytes", "pss_bytes"]
    times = [float(row["time_s"]) for row in found]
    assert times == sorted(times)
    assert times[0] < 0.05
    assert times[-1] > 0.2


def test_input_output_and_errors_of_the_program_pass_through():
    code = "import sys; sys.stdout.write(sys.stdin.read().upper()); print('e', file=sys.stderr)"
    done = run(python(code), input="some\nlines\n")
    assert done.stdout == "SOME\nLINES\n"
    ours = [line for line in done.stderr.splitlines() if line.startswith("labsupport monitor: ")]
    assert [line for line in done.stderr.splitlines() if line not in ours] == ["e"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 128 + 15),
    ],
)
def test_the_exit_status_is_the_programs_and_the_summary_is_written_anyway(tmp_path, code, status):
    out = tmp_path / "memory.csv"
    done = run(python(code, out=out))
    assert done.returncode == status
    assert f"ended with status {status}" in done.stderr
    assert len(rows(out)) >= 1


def test_a_command_that_is_not_there_is_status_127_and_leaves_no_file(tmp_path):
    out = tmp_path / "memory.csv"
    done = run(arguments("no-such-program-here", "--version", out=out))
    assert done.returncode == 127
    assert done.stderr.strip() == "labsupport monitor: command not found: no-such-program-here"
    assert not out.exists()
    script = tmp_path / "script"
    script.write_text("no program")
    assert run(arguments(script)).returncode == 126


def test_the_programs_own_options_are_left_alone():
    show = [sys.executable, "-c", "import sys; print(sys.argv[1:])"]
    given = ["--out", "x", "--", "--interval=9", "-h"]
    assert run(arguments(*show, *given)).stdout.strip() == str(given)
    without_dashes = [arg for arg in arguments(*show, *given[:2]) if arg != "--"]
    assert run(without_dashes).stdout.strip() == str(given[:2])


def test_files_are_not_overwritten_unless_asked_and_nothing_runs_before_that_is_known(tmp_path):
    out, ran = tmp_path / "memory.csv", tmp_path / "ran"
    out.write_text("mine")
    with pytest.raises(FileExistsError, match="--force"):
        run_monitored(["touch", str(ran)], out=out)
    with pytest.raises(ValueError, match=r"\.png"):
        run_monitored(["touch", str(ran)], chart=tmp_path / "chart.jpeg")
    assert (ran.exists(), out.read_text()) == (False, "mine")
    args = arguments("touch", ran, out=out)
    args.insert(args.index("--"), "--force")
    assert run(args).returncode == 0
    assert out.read_text().startswith("time_s,")


def test_csv_and_chart_cannot_be_the_same_file(tmp_path):
    ran, same, link = tmp_path / "ran", tmp_path / "x.svg", tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(ValueError, match="the same file"):
        run_monitored(["touch", str(ran)], out=same, chart=link / "x.svg")
    assert (ran.exists(), same.exists()) == (False, False)


def test_a_program_that_ends_before_the_first_sample_has_no_peak_and_no_chart(tmp_path):
    out, chart = tmp_path / "memory.csv", tmp_path / "memory.png"
    done = run([sys.executable, "-c", LATE, str(out), str(chart)])
    assert done.returncode == 0
    assert "it ended before the first sample: its memory was never read" in done.stderr
    assert "the system's own peak of its largest single process" in done.stderr
    assert "no chart was drawn" in done.stderr
    assert "0 B" not in done.stderr
    assert all(line.startswith("labsupport monitor: ") for line in done.stderr.splitlines())
    assert not chart.exists()
    assert len(rows(out)) == 1


def test_the_csv_can_be_read_at_any_moment_while_the_program_runs(tmp_path):
    out = tmp_path / "memory.csv"
    process, _ = start(python("import time; print(1, flush=True); time.sleep(1)",
                              interval=0.02, out=out))  # fmt: skip
    lengths = []
    while process.poll() is None and len(lengths) < 20:
        lines = out.read_text().splitlines(keepends=True)
        lengths.append(len(lines))
        assert all(line.endswith("\n") and line.count(",") == lines[0].count(",") for line in lines)
        time.sleep(0.04)
    finish(process)
    assert len(set(lengths)) > 5


def test_control_c_reaches_the_program_first_and_then_the_files_are_written(tmp_path):
    out, chart = tmp_path / "memory.csv", tmp_path / "memory.png"
    process, first = start(python(STUBBORN, out=out, chart=chart))
    assert first == "ready"
    process.send_signal(signal.SIGINT)
    said, summary, status = finish(process)
    assert said.split() == ["noted", "tidied"]  # once: the signal came to it once
    assert status == 5
    assert "ended with status 5" in summary
    assert float(rows(out)[-1]["time_s"]) > 0.6  # sampled to the end
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert f"written: {out}" in summary
    assert f"written: {chart}" in summary


def test_the_third_signal_ends_a_program_that_ignores_them_all():
    process, _ = start(python(DEAF))
    program = psutil.Process(process.pid).children()[0].pid
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # the third one: no more waiting
    _, summary, status = finish(process)
    assert status == 128 + 9
    assert "ended with status 137" in summary
    assert wait_until_gone(program)


def test_a_program_that_only_ignores_control_c_gets_sigterm():
    code = DEAF.replace(", signal.SIGTERM", ",")
    process, _ = start(python(code, grace=0.3))
    process.send_signal(signal.SIGINT)
    assert finish(process)[2] == 128 + 15


def test_nobody_is_left_behind_not_even_an_orphan_in_a_session_of_its_own():
    if sys.platform != "linux":
        pytest.skip("orphans are adopted on Linux")
    done = run(python(ORPHAN, interval=0.02))
    assert done.returncode == 0
    assert "had left running" in done.stderr
    assert wait_until_gone(int(done.stdout))


def test_grandchildren_end_with_an_interrupted_program():
    code = (
        "import subprocess, sys, time\n"
        "inner = 'import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);' \\\n"
        "        'print(1, flush=True); time.sleep(60)'\n"
        "p = subprocess.Popen([sys.executable, '-c', inner], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)\n"
    )
    process, first = start(python(code))
    process.send_signal(signal.SIGINT)
    _, summary, status = finish(process)
    assert status in (1, 130)  # Python ends itself with the signal, or with its traceback
    assert "had left running" in summary
    assert wait_until_gone(int(first))


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
    read_until(b"can miss")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert b"ADA" in said
    assert said.count(b"noted") == 1  # its line may be cut by one of ours
    assert b"tidied" in said
    assert os.waitstatus_to_exitcode(status) == 5
