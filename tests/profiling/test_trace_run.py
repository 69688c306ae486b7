"""A program under torch.profiler without a change to it: `labsupport.profiling.trace.run`."""

import csv
import gzip
import json
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys, torch
import neighbour
print(__name__, sys.argv[1:])
x = torch.ones(64, 64)
for _ in range(7):
    x @ x
if "fail" in sys.argv:
    raise LookupError("this one fails")
sys.exit(neighbour.STATUS)
"""
ENDLESS = """
import time, torch
x = torch.ones(64, 64)
print("ready", flush=True)
while True:
    x @ x; time.sleep(0.01)
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "neighbour.py").write_text("STATUS = 3\n")
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


def start(out, *program, options=()):
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "labsupport.profiling.trace.run", "--out", str(out)]
    return subprocess.Popen(
        [*command, *options, "--", *map(str, program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(out, *program, options=()):
    process = start(out, *program, options=options)
    printed, said = process.communicate(timeout=60)
    return process.returncode, printed, said


def products(out):
    with (out / "kernels.csv").open(newline="") as file:
        return next(int(row["calls"]) for row in csv.DictReader(file) if row["name"] == "aten::mm")


def test_a_script_runs_as_python_would_run_it_and_is_traced(script, tmp_path):
    out = tmp_path / "out"
    status, printed, said = run(out, script, "a", "--b")
    assert (status, printed) == (3, "__main__ ['a', '--b']\n"), said
    assert products(out) == 7
    with gzip.open(out / "trace.json.gz", "rt") as file:
        assert any(event["name"] == "aten::mm" for event in json.load(file)["traceEvents"])
    assert json.loads((out / "note.json").read_text())["problem"] == ""
    with (out / "memory.csv").open(newline="") as file:
        sizes = [int(float(row["change_bytes"])) for row in csv.DictReader(file)]
    assert sizes.count(64 * 64 * 4) == 8  # the matrix, and seven products


def test_an_error_is_told_as_python_tells_it_and_the_trace_is_kept(script, tmp_path):
    out = tmp_path / "out"
    status, _, said = run(out, script, "fail")
    plain = subprocess.run([sys.executable, script, "fail"], capture_output=True, text=True)
    assert (status, said) == (1, plain.stderr)
    assert products(out) == 7


def test_code_and_modules_run_too(tmp_path):
    code = "import sys, torch; print(sys.argv); torch.ones(2, 2) @ torch.ones(2, 2)"
    status, printed, _ = run(tmp_path / "code", "-c", code, "x")
    assert (status, printed) == (0, "['-c', 'x']\n")
    assert products(tmp_path / "code") == 1
    status, printed, _ = run(tmp_path / "module", "-m", "calendar", "2026", "1")
    assert status == 0
    assert "January 2026" in printed


def test_the_recording_ends_by_the_clock_while_the_program_goes_on(tmp_path):
    out = tmp_path / "out"
    code = ENDLESS.replace("while True:", "end = time.time() + 1.2\n"
                           "while time.time() < end:")  # fmt: skip
    status, *_ = run(out, "-c", code, options=["--after", "0.2", "--seconds", "0.3"])
    note = json.loads((out / "note.json").read_text())
    assert status == 0
    assert note["stopped_by"] == "its limit of 0.3 s"
    assert 0.2 < note["recorded_s"] < 1.0
    assert note["ended_s"] > 1.2


def test_an_interrupted_program_keeps_its_trace(tmp_path):
    out = tmp_path / "out"
    process = start(out, "-c", ENDLESS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert products(out) > 1
