"""`labsupport monitor --live`, run as users run it: alone, around a program, in a terminal."""

import dataclasses
import datetime
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from labsupport.profiling.monitoring.gpu_state import Gpus, GpuState, open_gpus
from labsupport.profiling.monitoring.live import LiveView, watch
from labsupport.profiling.monitoring.view import (
    NO_GPU,
    MachineState,
    Moment,
    as_table,
    gpu_rows,
    plain_lines,
    read_machine,
)

PROGRAM = [sys.executable, "-m", "labsupport.cli", "monitor", "--live"]
MACHINE = MachineState(37.4, 16, 3 * 2**30, 128 * 2**30, 2.25)
BUSY = GpuState(
    index=0, name="NVIDIA H200", busy_percent=100, used_bytes=2 * 2**30,
    total_bytes=143_771 * 2**20, sm_mhz=1395, max_sm_mhz=1980, memory_mhz=3201,
    max_memory_mhz=3201, celsius=61, power_w=698.6, limit_w=700.0, reasons=0x4,
    users={4_000_001: 2**30},
)  # fmt: skip
NOON = datetime.datetime(2026, 2, 3, 12, 0, 0)


def run(*arguments, **options):
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=60, **options
    )


def blocks(text):
    """The refreshes of a view without a terminal: each begins with its time."""
    return re.findall(r"^(\d{4}-\d\d-\d\d \S+)\n  machine: (.*)$", text, re.MULTILINE)


def in_terminal(arguments, act=None, seconds=60):
    """What a terminal shows, and the exit status; `act(pid, text so far)` may send signals."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(arguments[0], arguments)
    text, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 0.1)
        if ready:
            try:
                text += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
        if act is not None and act(terminal, text):
            act = None
    os.close(terminal)
    return text.decode(errors="replace"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def shown(moment, **options):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(as_table(moment, 1.0, **options))
    return console.file.getvalue()


def test_without_a_terminal_each_refresh_is_a_block_of_lines():
    done = run("--count", "3", "--interval", "0.05")
    assert done.returncode == 0
    assert done.stderr == ""
    assert len(blocks(done.stdout)) == 3
    assert "\x1b" not in done.stdout
    assert all("% of" in machine and "memory" in machine for _, machine in blocks(done.stdout))


def test_without_a_gpu_it_says_so_and_goes_on():
    done = run("--count", "2", "--interval", "0.05", env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout.count(NO_GPU) == 2


def test_control_c_ends_it_with_status_0():
    process = subprocess.Popen(
        [*PROGRAM, "--interval", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


def test_another_signal_is_its_status():
    process = subprocess.Popen([*PROGRAM, "--interval", "60"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline()
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_reader_that_goes_away_ends_it_quietly():
    process = subprocess.Popen(
        [*PROGRAM, "--interval", "0.02"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(timeout=30), err) == (0, "")


def test_in_a_terminal_the_view_stands_still_and_the_cursor_comes_back():
    def act(terminal, text):
        if text.count(b"Control-C ends it") < 2:
            return False
        os.write(terminal, b"\x03")
        return True

    text, status = in_terminal([*PROGRAM, "--interval", "0.1"], act)
    assert status == 0
    assert "\x1b[1A" in text  # it goes back up, and writes over itself
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > -1  # shown after it was hidden


def test_a_program_is_watched_and_its_status_returned():
    code = "import sys, time; print('mine'); time.sleep(0.4); sys.exit(7)"
    done = run("--interval", "0.1", "--", sys.executable, "-c", code)
    assert done.returncode == 7
    assert done.stdout == "mine\n"
    assert len(blocks(done.stderr)) >= 2
    assert "ended with status 7" in done.stderr
    assert "memory: peak" in done.stderr


def test_in_a_terminal_the_programs_lines_stand_above_the_view():
    code = (
        "import sys, time\n"
        "for i in range(3): print('line', i, flush=True); time.sleep(0.2)\n"
        "print('to stderr', file=sys.stderr, flush=True)\n"
        "print('no newline at the end', end='')"
    )
    text, status = in_terminal([*PROGRAM, "--interval", "0.1", "--", sys.executable, "-c", code])
    assert status == 0
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").split("\n")
    for line in ("line 0", "line 1", "line 2", "to stderr", "no newline at the end"):
        assert line in said
    assert "ended with status 0" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > -1


def test_a_program_that_is_not_there_is_127_and_leaves_the_terminal_alone():
    text, status = in_terminal([*PROGRAM, "--", "no-such-program-here"])
    assert status == 127
    assert "command not found: no-such-program-here" in text
    assert "\x1b[?25l" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "2", "--", "true"], "--count goes with --live, and without a program"),
        (["--count", "0"], "must be 1 or more"),
        (["--out", "x.csv"], "record a program"),
        (["--interval", "0"], "must be 0.001 s or more"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(arguments, message):
    done = run(*arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_live_and_without_a_program_it_asks_for_one():
    done = subprocess.run([*PROGRAM[:-1]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "monitor --live" in done.stderr


def test_a_gpus_rows_are_figures_with_units():
    assert gpu_rows(BUSY) == {
        "in use": "100% of the time",
        "memory": "2.0 GiB of 140.4 GiB",
        "SM clock": "1395 of 1980 MHz",
        "memory clock": "3201 of 3201 MHz",
        "temperature": "61 °C",
        "power": "699 of 700 W",
        "held down by": "power limit",
        "processes": "4000001 1.0 GiB",
    }


def test_what_cannot_be_read_is_said_and_is_not_zero():
    rows = gpu_rows(GpuState(index=0, name="GPU"))
    assert set(rows.values()) == {"not readable here"}
    zero = gpu_rows(dataclasses.replace(BUSY, busy_percent=0, used_bytes=0, reasons=0, users={}))
    assert zero["in use"] == "0% of the time"
    assert zero["memory"] == "0 B of 140.4 GiB"
    assert zero["held down by"] == "nothing"
    idle = dataclasses.replace(BUSY, reasons=0x1)
    assert gpu_rows(idle)["held down by"] == "nothing (idle)"
    assert zero["processes"] == "none that can be seen"


def test_the_table_has_a_column_for_each_gpu():
    second = dataclasses.replace(BUSY, index=1, sm_mhz=345, reasons=0x1)
    text = shown(Moment(NOON, MACHINE, [BUSY, second]))
    assert "GPU 0 NVIDIA H200" in text
    assert "GPU 1 NVIDIA H200" in text
    assert re.search(r"SM clock +│ 1395 of 1980 MHz +│ 345 of 1980 MHz", text)
    assert "CPU 37% of 16 cores, load 2.2, memory 3.0 GiB of 128.0 GiB" in text


def test_brackets_of_a_program_are_its_own():
    text = shown(Moment(NOON, MACHINE, []), last_words="[red]epoch 3[/red]")
    assert "[red]epoch 3[/red]" in text


def test_one_intervals_failure_is_said_and_the_view_goes_on():
    class Gone(Gpus):
        """A real reader whose driver answers nothing: as after it was unloaded."""

        def __init__(self):
            self._nvml, self._handles = object(), [object()]

        def _state(self, index, handle):
            return GpuState(index=index, name="")

    file = io.StringIO()
    with LiveView(0.1, file) as view:
        view._gpus = Gone()
        view.refresh()
        assert view._gpus is None  # it is opened anew the next time
        view.refresh()
    first, second = file.getvalue().split("\n  machine: ")[1:]
    assert "could not be read this time: no GPU answers any more" in first
    assert "could not be read this time" not in second


def test_the_plain_lines_hold_everything():
    lines = plain_lines(Moment(NOON, MACHINE, [BUSY]))
    assert lines[0] == "2026-02-03 12:00:00"
    assert lines[2].startswith("  GPU 0 NVIDIA H200: in use 100% of the time; memory 2.0 GiB of")


def test_the_first_refresh_knows_the_cpus_use():
    # Enough of them to be 1% of a large machine.
    spin = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(spin) for _ in range(1 + read_machine().cores // 50)]
    try:
        done = run("--count", "1")
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    [(_, machine)] = blocks(done.stdout)
    assert not machine.startswith("CPU 0%")


def test_the_machine_here_is_read():
    machine = read_machine()
    assert 0 < machine.used_bytes < machine.total_bytes
    assert machine.cores >= 1


def test_the_call_from_python_counts_too(capsys):
    assert watch(0.01, count=2) == 0
    assert len(blocks(capsys.readouterr().out)) == 2


def test_a_real_gpu_is_read():
    gpus = open_gpus()
    if gpus is None:
        pytest.skip("needs an NVIDIA GPU")
    [state, *_] = gpus.read()
    gpus.close()
    assert state.name
    assert 0 <= state.used_bytes <= state.total_bytes
    assert state.total_bytes > 2**30
