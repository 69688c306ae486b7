"""`labsupport profile`: a shape, NVIDIA's profilers, and what goes wrong on the way."""

import gzip
import json
import re

import pandas as pd
import pytest
from typer.testing import CliRunner

from labsupport.analysis import nsight
from labsupport.cli import app
from labsupport.commands import profile as profiles
from labsupport.commands.profile import Summary

SMALL = ["--batch=1", "--seqlen=64", "--nheads=2", "--headdim=16", "--seconds=0.1", "--device=cpu"]


def run(*arguments):
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def summary(folder):
    return (folder / "SUMMARY.md").read_text(encoding="utf-8")


def test_a_shape_gives_a_folder_that_opens_with_its_summary(tmp_path):
    out = tmp_path / "out"
    done = run("--out", out, *SMALL, "--backend=sdpa_flash,fa2")  # the second cannot run here
    assert done.exit_code == 0, done.output
    text = summary(out)
    assert text.startswith("# Profile of attention: standard, forward+backward, batch 1, 64 tokens")
    assert "State: complete." in text
    machine = text.split("## The machine\n\n")[1].split("\n")[0]
    assert re.search(r"of memory\. Measured here: copy [\d.]+ [MG]B/s; matmul float32 \d", machine)
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles == ["The machine", "Baseline and comparison", "How close to the ceiling",
                      "Where the time goes", "What is missing", "Files"]  # fmt: skip
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert files == set(re.findall(r"^- \[`.+`\]\((.+)\)$", text, re.MULTILINE))
    assert re.findall(r"^- (nsys|ncu): ", text, re.MULTILINE) == ["nsys", "ncu"]

    table = pd.read_csv(out / "comparison.csv").set_index("backend")
    statuses = {"standard": "ok", "sdpa_flash": "ok", "fa2": "unsupported"}
    assert table["status"].to_dict() == statuses
    ceiling = text.split("## How close to the ceiling")[1].split("##")[0]
    row = next(line.split() for line in ceiling.splitlines() if line.strip().startswith("standard"))
    assert float(row[2]) / float(row[1]) == pytest.approx(float(row[4]), rel=0.1)
    assert json.loads((out / "environment.json").read_text())["ceilings"]["copy_gb_s"] > 0

    with gzip.open(out / "standard" / "trace.json.gz", "rt") as file:
        assert any(event["name"] == "aten::bmm" for event in json.load(file)["traceEvents"])
    assert "aten::bmm" in (out / "standard" / "kernels.txt").read_text()
    assert re.search(r"### standard\n\n```text\n-+ .*\n +Name ", text)


def test_wrong_requests_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for arguments, words in ((["--out", "."], "is not empty"), (["--backend=nosuch"], "nosuch")):
        done = run("--device=cpu", *arguments)
        assert words in str(done.exception)
    assert len(list(tmp_path.rglob("*"))) == 1


def test_sections_fail_alone(tmp_path):
    report = Summary(tmp_path, "Title")
    with report.section("A"):
        report.add("found so far")
        raise MemoryError("no room")
    assert "State: not complete: it was interrupted" in summary(tmp_path)
    with report.section("B"):
        report.add("all well")
    report.write("**not complete**, see the end")
    parts = "see the end.\n\n## A\n\nfound so far\n\n## B\n\nall well", "- A: MemoryError: no room"
    assert all(part in summary(tmp_path) for part in parts)


# --- NVIDIA's profilers: their documented formats, with made-up figures ---------------------------

STALL = "{}".join(nsight.STALL)
READINGS = {
    nsight.DURATION: ("ns", "1,000", "2,000,000"),
    nsight.TENSOR: ("%", "0", "72.5"),
    nsight.OCCUPANCY: ("%", "50", "18.2"),
    **dict(zip(nsight.BYTES, (("byte", "n/a", "300,000,000"), ("byte", "n/a", "10,000,000"),
                              ("byte", "16", "400,000,000"), ("byte", "8", "40,000,000"),
                              ("byte", "0", "10,000,000")), strict=True)),
    STALL.format("gmma"): ("inst", "0", "2.5"),
    STALL.format("wait"): ("inst", "0", "2.5"),
    STALL.format("long_scoreboard"): ("inst", "0", "5"),
    STALL.format("selected"): ("inst", "1", "40"),
}  # fmt: skip


def ncu_csv():
    def row(first, cells):
        return ",".join(f'"{cell}"' for cell in [*first, *cells])

    units, small, flash = zip(*READINGS.values(), strict=True)
    lines = ["==PROF== Connected to process 7", row(["ID", "Kernel Name"], READINGS)]
    lines += [row(["", ""], units), row(["0", "small"], small), "the program's own words"]
    return "\n".join([*lines, row(["1", "flash"], flash), "==PROF== Disconnected"])


def test_counters_are_read_from_among_ncus_talk_and_the_table_begins_with_the_longest():
    small, flash = nsight.read_ncu(ncu_csv())
    assert (small["kernel"], small[nsight.DURATION], flash[nsight.TENSOR]) == ("small", 1000, 72.5)
    assert next(iter(nsight.BYTES)) not in small  # n/a
    assert nsight.top_stall(flash).startswith("long_scoreboard, 50%")
    assert nsight.top_stall(small) == ""
    with pytest.raises(ValueError, match="==ERROR== unknown metric"):
        nsight.read_ncu("==ERROR== unknown metric\n")
    columns = ["kernel", "ms", "L2 to SM, MB", "DRAM, MB", "DRAM, GB/s"]
    first = nsight.launch_table([small, flash])[columns].iloc[0]
    assert first.tolist() == ["flash", 2, 310, 50, pytest.approx(25)]


def test_the_profilers_leave_clocks_alone_and_their_reports_are_shown(tmp_path, monkeypatch):
    commands, report = [], Summary(tmp_path, "Title")

    def printed(command):
        commands.append(" ".join(command))
        return ncu_csv() if "--import" in command else "\nflash_fwd_kernel"

    monkeypatch.setattr(nsight, "run", printed)
    profiles.look_with_ncu(report, "ncu", tmp_path, ["python", "x.py"])
    profiles.look_with_nsys(report, "nsys", tmp_path, ["python", "x.py"])
    look, page, record, stats = commands
    for command, words in (
        (look, ("--clock-control none", "--profile-from-start off", "python x.py")),
        (page, ("--page raw --print-units base --import",)),
        (record, ("--capture-range=cudaProfilerApi", "python x.py")),
        (stats, ("nsys.nsys-rep",)),
        ("\n".join(report.parts), ("flash_fwd_kernel", "long_scoreboard, 50%")),
        ((tmp_path / "ncu.csv").read_text(), (ncu_csv(),)),
    ):
        assert all(part in command for part in words), command


def test_a_profiler_that_fails_says_why():
    assert nsight.run(["echo", "a table"]) == "a table\n"
    for command, message in (
        (["echo", "ERR_NVGPUCTRPERM"], "only administrators"),
        (["sh", "-c", "echo no GPU; exit 3"], "sh ended with 3: no GPU"),
    ):
        with pytest.raises(RuntimeError, match=message):
            nsight.run(command)
