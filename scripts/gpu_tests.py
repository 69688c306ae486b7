"""Everything that only a GPU can run: `make test-gpu`, or `python scripts/gpu_tests.py [options]`.

Options go to pytest. On a GPU the grids of tests/attention have up to 400 cases each, all judged
by flash-attn's error rule. Ends with a table, and with a row for docs/versions.md.
"""

import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import date
from pathlib import Path

PROJECT = Path(__file__).parents[1]
SKIPS = re.compile(r'skipif\(\s*(not \(?(torch\.cuda|GPU|HOPPER)|DEVICE == "cpu")')
OUTCOMES = ("passed", "failed", "skipped")


def main(options: list[str]) -> int:
    """Run the tests and print the table; returns pytest's exit status."""
    import torch
    import transformers
    import triton

    if not torch.cuda.is_available():
        print("make test-gpu needs a GPU that PyTorch can use")
        return 2
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "12"]
        command += ["--dist", "worksteal", f"--junitxml={report}", *options, *tests()]
        status = subprocess.run(command, cwd=PROJECT, check=False).returncode
        found = counts(report.read_text(encoding="utf-8")) if report.exists() else {}
    for name, row in found.items():
        print(f"{name:44}", *(f"{row[outcome]:6} {outcome}" for outcome in OUTCOMES))
    passed, failed, _ = (sum(row[outcome] for row in found.values()) for outcome in OUTCOMES)
    card = torch.cuda.get_device_name()
    print(f"{card}, {time.monotonic() - started:.0f} s")
    versions = platform.python_version().rpartition(".")[0], torch.__version__.partition("+")[0]
    row = *versions, triton.__version__, transformers.__version__, f"`make test-gpu`, {card}"
    print("|", " | ".join(map(str, (*row, f"{passed:,}", failed, date.today()))), "|")
    return status


def tests() -> list[str]:
    """Return the kernels' grids, and every other file with a test that is skipped without a GPU."""
    files = sorted((PROJECT / "tests").rglob("test_*.py"))
    found = [file for file in files if SKIPS.search(file.read_text("utf-8"))]
    return ["tests/attention", *(str(x) for x in found if x.parent.name != "attention")]


def counts(report: str) -> dict[str, Counter[str]]:
    """Return the outcomes of each test file, from pytest's report in XML."""
    found: dict[str, Counter[str]] = {}
    for case in ET.fromstring(report).iter("testcase"):
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif case.find("skipped") is not None:
            outcome = "skipped"
        found.setdefault(case.get("classname", ""), Counter())[outcome] += 1
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
