"""`labsupport doctor --report`: what a bug report needs."""

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import labsupport
from labsupport.cli import app
from labsupport.profiling import bug_report


def refused(*arguments):
    CliRunner().invoke(app, ["doctor", *map(str, arguments)], catch_exceptions=False)


def test_the_report_holds_what_a_bug_report_needs(tmp_path):
    report, log = tmp_path / "report.md", tmp_path / "train.log"
    log.write_text("\n".join(f"line {n}" for n in range(300)))
    command = [sys.executable, "-m", "labsupport.cli", "doctor"]
    done = subprocess.run(
        [*command, "--report", str(report), "--log", str(log)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    text = report.read_text()
    assert text.startswith(f"# labsupport {labsupport.__version__}: bug report")
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections == ["Doctor", "System and versions", "Attention", "End of train.log"]
    for part in ("commit ", "[ok] Python", "PyTorch version", "sdpa_flash", "flash-attn-4"):
        assert part in text
    for dtype in ("float32", "float16", "bfloat16"):  # which kernel ran
        assert re.search(rf"^{dtype}, causal: \w+ ran \(.+\)", text, re.MULTILINE)
    assert re.search(r"^self-test: all \d+ within the allowed error", text, re.MULTILINE)
    assert "\nline 299\n" in text
    assert "\nline 99\n" not in text
    for words in (text, done.stdout):
        assert "Read it before you post it" in words


def test_a_report_overwrites_nothing_and_says_so(tmp_path):
    report = tmp_path / "report.md"
    report.write_text("mine")
    with pytest.raises(FileExistsError):
        refused("--report", report)
    assert report.read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        refused("--report", tmp_path / "new.md", "--log", tmp_path / "no.log")
    assert not (tmp_path / "new.md").exists()
    with pytest.raises(ValueError, match="goes with --report"):
        refused("--log", report)


def test_a_crash_of_pytorch_is_reported_and_does_not_end_the_report(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("import os; os.abort()")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), str(bug_report.project_root())])
    )
    bug_report.write_report(tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert "labsupport.profiling.bug_report: status -6" in text
    assert text.count("````") == 6


def test_the_self_test_fails_for_a_wrong_implementation(monkeypatch, capsys):
    from labsupport.profiling import accuracy

    right = accuracy.attention

    def shifted(q, k, v, **options):
        return right(q, k, v, **options) * (1.05 if options["backend"] != "standard" else 1)

    monkeypatch.setattr(accuracy, "attention", shifted)
    bug_report.main()
    assert "self-test: WRONG RESULTS" in capsys.readouterr().out
