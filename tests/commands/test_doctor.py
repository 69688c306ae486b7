"""`labsupport doctor --report`: everything that a bug report needs, in one file."""

import re

import pytest
from typer.testing import CliRunner

import labsupport
from labsupport.cli import app


def doctor(*arguments):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.slow
def test_the_report_holds_what_a_bug_report_needs(tmp_path):
    report, log = tmp_path / "report.md", tmp_path / "train.log"
    log.write_text("\n".join(f"line {n}" for n in range(300)))
    done = doctor("--report", report, "--log", log)
    assert done.exit_code == 0, done.output
    text = report.read_text()
    assert text.startswith(f"# labsupport {labsupport.__version__}: bug report")
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert sections == ["Doctor", "System and versions", "Attention", "End of train.log"]
    assert all(part in text for part in ("commit ", "[ok] Python", "PyTorch version"))
    # Each attention with its error and its kernel, or the reason why it cannot run.
    assert re.search(r"^sdpa_flash +256 .* aten::_scaled_dot_product_flash", text, re.MULTILINE)
    assert "````text\nline 100\n" in text  # the last 200 lines
    assert "Read it before you post it" in text
    assert "Read it before you post it" in done.output


def test_a_report_overwrites_nothing_and_says_so(tmp_path):
    report, new = tmp_path / "report.md", tmp_path / "new.md"
    report.write_text("mine")
    for error, arguments in (
        (FileExistsError, ("--report", report)),
        (FileNotFoundError, ("--report", new, "--log", tmp_path / "no.log")),
        (ValueError, ("--log", report)),
    ):
        with pytest.raises(error):
            doctor(*arguments)
    assert report.read_text() == "mine"
    assert not new.exists()
