"""`labsupport profile`, run as users run it: a shape, a program, and what goes wrong on the way."""

import csv
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from labsupport.analysis.profile.program_plan import as_python
from labsupport.analysis.profile.report import NotHereError, Report
from labsupport.commands.profile import profile_command

PROGRAM = [sys.executable, "-m", "labsupport.cli", "profile"]
SMALL = ["--batch=1", "--seqlen=64", "--nheads=2", "--headdim=16", "--seconds=0.1", "--device=cpu"]
SCRIPT = """
import sys, torch
x = torch.ones(64, 64)
for _ in range(7):
    x @ x
print("said", sys.argv[1])
sys.exit(int(sys.argv[1]))
"""
ENDLESS = """
import sys, time, torch
print("ready", file=sys.stderr, flush=True)
while True:
    torch.ones(9, 9) @ torch.ones(9, 9)
    time.sleep(0.01)
"""


def run(*arguments, **options):
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def limited(size):
    """No file may grow beyond so many bytes: a disk that is full, for each file alone."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def summary(folder):
    return (folder / "SUMMARY.md").read_text(encoding="utf-8")


def missing(text):
    """What the summary says is missing, and why."""
    table = text.split("## What is missing, and why")[1].split("## Files")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    return {row[0].removeprefix("| "): row[1] for row in rows}


def leftovers(folder):
    return list(folder.rglob(".*"))


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """A small shape with a backend that cannot run here: what was said, and the folder."""
    out = tmp_path_factory.mktemp("profile") / "out"
    return run("--out", out, *SMALL, "--backend=sdpa_flash,fa2"), out


def test_a_shape_gives_a_folder_that_opens_with_its_summary(shape):
    done, out = shape
    assert done.returncode == 0, done.stderr
    text = summary(out)
    assert text.startswith("# Profile of attention: 1 × 64 × 2 × 16, float32")
    assert "State: complete." in text
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles == [
        "In short",
        "1. The machine",
        "2. Baseline and comparison",
        "3. Where the time goes",
        "4. Memory over time",
        "5. Bandwidth and occupancy",
        "6. Timelines, and how to open them",
        "What is missing, and why",
        "Files",
    ]
    assert "ui.perfetto.dev" in text


def test_every_file_that_the_summary_names_is_there_and_nothing_is_left_over(shape):
    _, out = shape
    links = set(re.findall(r"\]\(([^)#<]+)\)", summary(out)))
    assert {"monitor.png", "memory.png", "comparison.csv", "standard/trace.json.gz"} <= links
    files = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()}
    assert files == links | {"SUMMARY.md"}
    assert not leftovers(out)
    assert (out / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_backend_that_fails_is_a_row_and_a_line_of_what_is_missing(shape):
    _, out = shape
    with (out / "comparison.csv").open(newline="", encoding="utf-8") as file:
        status = {row["backend"]: row["status"] for row in csv.DictReader(file)}
    assert status == {"standard": "ok", "sdpa_flash": "ok", "fa2": "unsupported"}
    assert "unsupported" in missing(summary(out))["backend fa2"]


def test_the_tables_say_what_ran(shape):
    _, out = shape
    with gzip.open(out / "standard" / "trace.json.gz", "rt") as file:
        assert any(e["name"] == "aten::bmm" for e in json.load(file)["traceEvents"])
    with (out / "standard" / "memory.csv").open(newline="") as file:
        standard = max(int(row["extra_bytes"]) for row in csv.DictReader(file))
    with (out / "sdpa_flash" / "memory.csv").open(newline="") as file:
        fused = max(int(row["extra_bytes"]) for row in csv.DictReader(file))
    assert fused < standard
    found = json.loads((out / "environment.json").read_text(encoding="utf-8"))
    # Some builds leave their kind (+cu130) out of what they are installed as.
    named = found["provenance"]["versions"]["torch"]
    assert torch.__version__.split("+")[0] == named.split("+")[0]
    assert found["ceilings"]["copy_gb_s"] > 0
    assert {check["name"] for check in found["doctor"]} >= {"Python", "PyTorch"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_is_missing_with_its_reason(shape):
    found = missing(summary(shape[1]))
    for what in ("Nsight Systems", "Nsight Compute: the counters that matter"):
        assert "PyTorch sees none here" in found[what]
    assert "figure of GPUs" in found["occupancy"]


def test_on_a_full_disk_what_fits_is_kept_and_the_rest_is_named(tmp_path):
    out = tmp_path / "out"
    done = run("--out", out, *SMALL, "--backend=sdpa_flash", preexec_fn=limited(14_000))
    assert done.returncode == 1, done.stderr
    text = summary(out)
    assert "**not complete**" in text
    found = missing(text)
    assert "Memory over time" in found  # a chart is larger
    assert "files of the trace of standard" in found
    assert "## 2. Baseline and comparison" in text
    assert (out / "comparison.csv").exists()
    assert not (out / "memory.png").exists()
    assert not leftovers(out)


def test_a_disk_without_room_for_the_summary_gives_it_on_the_terminal(tmp_path):
    out = tmp_path / "out"
    done = run("--out", out, *SMALL, "--backend=sdpa_flash", preexec_fn=limited(200))
    assert done.returncode == 1
    assert "SUMMARY.md could not be written" in done.stderr
    assert "# Profile of attention" in done.stdout
    assert "## 2. Baseline and comparison" in done.stdout
    assert not leftovers(out)


def interrupted(arguments, until, after):
    """Run until stderr has the words `until`, and `after` seconds more, and interrupt it."""
    process = subprocess.Popen(
        [*PROGRAM, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = ""
    while until not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    printed, rest = process.communicate(timeout=60)
    return process.returncode, printed, said + rest


def test_an_interrupt_keeps_what_was_gathered(tmp_path):
    out = tmp_path / "out"
    slow = ["--batch=1", "--seqlen=8192", "--nheads=1", "--no-grad", "--device=cpu"]
    slow += ["--seconds=60", "--backend=sdpa_flash"]
    status, _, said = interrupted(["--out", out, *slow], "Baseline and comparison", 0.5)
    assert status == 130, said
    text = summary(out)
    assert "State: **interrupted** by Control-C" in text
    assert "**Ceilings, measured here**" in text
    found = missing(text)
    assert "interrupted by" in found["Baseline and comparison"]
    assert "not reached" in found["Where the time goes"]
    assert not leftovers(out)


def test_a_python_program_runs_once_traced_and_sampled_and_its_status_is_passed_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    done = run("--out", out, "--device=cpu", "--", sys.executable, script, 3)
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("said 3") == 1
    text = summary(out)
    assert "| Exit status | 3 |" in text
    assert "under torch.profiler" in text
    row = next(line for line in text.splitlines() if line.startswith("| `aten::mm`"))
    assert row.split(" | ")[1] == "7"
    with gzip.open(out / "trace.json.gz", "rt") as file:
        assert any(event["name"] == "aten::mm" for event in json.load(file)["traceEvents"])
    with (out / "samples.csv").open(newline="") as file:
        assert max(int(row["rss_bytes"]) for row in csv.DictReader(file)) > 50 * 2**20
    assert (out / "memory.png").exists()
    assert "status 3" in missing(text)["the program's success"]
    assert "cannot look at one run together" in missing(text)["Nsight Systems"]


def test_a_program_that_is_not_python_is_sampled_and_the_summary_says_what_was_not_possible(
    tmp_path,
):
    out = tmp_path / "out"
    done = run("--out", out, "--device=cpu", "--", "sleep", 0.4)
    assert done.returncode == 0
    text = summary(out)
    assert "| Traced | without a tracer |" in text
    assert "Python programs only" in missing(text)["trace of torch.profiler"]
    assert (out / "memory.png").exists()


def test_an_interrupted_program_is_ended_and_its_trace_is_kept(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENDLESS)
    out = tmp_path / "out"
    status, _, said = interrupted(
        ["--out", out, "--device=cpu", "--", sys.executable, script], "ready", 0.3
    )
    assert status == 130, said
    text = summary(out)
    assert "State: **interrupted** by Control-C" in text
    assert "`aten::mm`" in text
    assert (out / "trace.json.gz").exists()


def test_wrong_requests_are_refused_before_anything_is_written(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("precious")
    requests: list[tuple[dict[str, Any], str]] = [
        ({"out": full}, "is not empty"),
        ({"out": tmp_path / "a", "seqlen": 64, "command": ["true"]}, "describe a shape"),
        ({"out": tmp_path / "b", "backend": "nosuch"}, "nosuch"),
        ({"out": tmp_path / "c", "preset": "nosuch"}, "no preset"),
        ({"out": tmp_path / "d", "tracer": "nosuch", "command": ["true"]}, "choose one of"),
    ]
    for options, words in requests:
        with pytest.raises((ValueError, OSError), match=words):
            profile_command(**options)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize(
    ("command", "interpreter", "program"),
    [
        ([sys.executable, "a.py", "x"], [sys.executable], ["a.py", "x"]),
        (
            [sys.executable, "-X", "dev", "-u", "a.py"],
            [sys.executable, "-X", "dev", "-u"],
            ["a.py"],
        ),
        ([sys.executable, "-m", "m", "-c"], [sys.executable], ["-m", "m", "-c"]),
        ([sys.executable, "-c", "pass"], [sys.executable], ["-c", "pass"]),
    ],
)
def test_commands_that_are_python_are_told_apart_from_options_of_python(
    command, interpreter, program
):
    found = as_python(command)
    assert found is not None
    assert (found.interpreter, found.program) == (interpreter, program)


def test_scripts_whose_first_line_names_python_are_python(tmp_path):
    for number, head in enumerate(
        (
            f"#!{sys.executable}\n",
            "#!/usr/bin/env python3\n",
            f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n",
        )
    ):
        script = tmp_path / f"script{number}"
        script.write_text(head)
        os.chmod(script, 0o755)
        found = as_python([str(script), "x"])
        assert found is not None
        assert found.program == [str(script), "x"]
    for command in (["sleep", "1"], [sys.executable], [sys.executable, "-"], ["nosuchprogram"]):
        assert as_python(command) is None


def test_steps_fail_alone(tmp_path):
    report = Report(tmp_path, "Title", "`command`", {"a": "A", "b": "B", "c": "C", "d": "D"})

    def broken(section):
        section.add("found so far")
        raise MemoryError("no room")

    def absent(section):
        raise NotHereError("no such tool", "install it")

    report.step("a", broken)
    report.step("b", absent)
    assert "State: **still running**" in summary(tmp_path)
    report.step("c", lambda section: section.add("all well"))
    report.step("d", lambda section: section.add("all well"))
    report.finish()
    text = summary(tmp_path)
    assert "## 1. A (partly)\n\nfound so far" in text
    assert "## 2. C\n\nall well" in text
    assert missing(text) == {"A": "MemoryError: no room", "B": "no such tool"}
    assert report.failed
