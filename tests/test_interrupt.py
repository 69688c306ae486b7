"""A program that caught an interrupt ends with the status that it chose."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from labsupport.interrupt import interrupted_status
try:
    exec("raise KeyboardInterrupt")  # as if it had struck while a dataclass was made
except KeyboardInterrupt:
    print("tidied up")
sys.exit({status})
"""


@pytest.mark.parametrize(("status", "ends_with"), [("interrupted_status()", 130), ("130", -2)])
def test_python_does_not_die_of_an_interrupt_that_was_caught_inside_exec(
    status, ends_with, tmp_path
):
    """Of the two programs, the second shows that there is something to be mended."""
    (tmp_path / "program.py").write_text(PROGRAM.format(status=status))
    done = subprocess.run(
        [sys.executable, "-m", "program"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "tidied up\n"
    assert done.returncode == ends_with, done.stderr
