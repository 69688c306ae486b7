"""Bugs show their traceback; errors that explain themselves do not."""

import os
import socket
import subprocess
import sys

import pytest

from labsupport.distributed.failures import short
from labsupport.distributed.launch import LaunchError

SMALL = ["--layers", 1, "--width", 32, "--heads", 2, "--length", 254, "--data", "records"]


def launch_error(what):
    return LaunchError(
        f"rank 1 of 2 failed: {what}\n\nTraceback (most recent call last):\n  ...", 1
    )


@pytest.mark.parametrize(
    ("what", "explained"),
    [
        ("ValueError: no preset", True),
        ("labsupport.attention.inputs.AttentionInputError: no", True),
        ("torch.OutOfMemoryError: with\nits remedies", True),
        ("RuntimeError: shapes do not fit", False),
        ("KeyError: 'ValueError'", False),  # only its name counts, not what it says
        ("json.JSONDecodeError: a ValueError of another kind", False),
        ("UnicodeDecodeError: and another", False),
    ],
)
def test_an_error_that_explains_itself_comes_without_a_traceback(what, explained):
    said = short(launch_error(what))
    assert said.startswith(f"labsupport: rank 1 of 2 failed: {what}")
    assert ("Traceback" in said) is not explained


BROKEN = """
import sys
from labsupport.training import data
def broken(*args, **options):
    raise {error}
data.named_batches = broken
from labsupport.cli import main
sys.argv = ["labsupport", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("error", "traceback"),
    [("RuntimeError('a bug')", True), ("ValueError('a refusal')", False)],
)
def test_under_torchrun_a_bug_shows_its_traceback_and_a_refusal_does_not(
    error, traceback, tmp_path
):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(error=error))
    arguments = ["train", *map(str, SMALL), "--device", "cpu", "--parallel", "ring", "--quiet"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sys.platform == "linux":
        values["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=os.environ | values | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    for rank, text in enumerate(said):
        assert f"labsupport: rank {rank}: a {'bug' if traceback else 'refusal'}" in text
        assert ("Traceback" in text) is traceback
