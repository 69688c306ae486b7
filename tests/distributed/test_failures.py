"""Bugs show their traceback; errors that explain themselves do not. Under torchrun, too."""

import os
import re
import signal
import socket
import sys
import time

import pandas as pd
import pytest
import torch.distributed as dist

from labsupport.distributed.failures import is_lost, short
from labsupport.distributed.launch import LaunchError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TRAIN = [
    *("train", "--layers", "1", "--width", "32", "--heads", "2", "--length", "254"),
    *("--data", "records", "--steps", "3", "--accumulation", "4", "--learning-rate", "3e-3"),
    *("--device", "cpu", "--quiet"),
]
BROKEN = """
import os, sys
from labsupport.training import data
def broken(*args, **options):
    raise {error}
if os.environ["RANK"] == "1":
    data.named_batches = broken
from labsupport.cli import main
sys.argv = ["labsupport", *sys.argv[1:]]
main()
"""


def test_an_error_that_explains_itself_comes_without_a_traceback():
    for what, explained in (
        ("labsupport.attention.inputs.AttentionInputError: no", True),
        ("torch.OutOfMemoryError: with\nits remedies", True),
        ("KeyError: 'ValueError'", False),  # only its name counts, not what it says
    ):
        start = f"rank 1 of 2 failed: {what}"
        text = short(LaunchError(f"{start}\n\nTraceback (most recent call last):\n  ...", 1))
        assert text.startswith(f"labsupport: {start}")
        assert ("Traceback" in text) is not explained


def test_a_lost_connection_is_no_cause_but_a_bug_that_led_to_it_is():
    lost = RuntimeError("[gloo] Connection closed by peer")
    assert is_lost(lost)
    assert is_lost(dist.DistStoreError("timed out"))
    assert not is_lost(RuntimeError("shapes do not fit"))
    lost.__cause__ = ValueError("the loss is negative")
    assert not is_lost(lost)


# --- several nodes: torchrun is started once for each, here all on this machine -------------------


def port_and_environment():
    """A free port, and the environment without what an outer run has set."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    return port, kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}


def losses(text):
    return [float(loss) for loss in re.findall(r"([\d.]+) at step", text)]


@pytest.mark.slow
def test_two_nodes_take_the_steps_of_one_process(python):
    port, environment = port_and_environment()
    command = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, "--rdzv-id", 1,
               "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]  # fmt: skip
    program = ["-m", "labsupport.cli", *TRAIN]
    nodes = [
        python.start(*command, *program, "--parallel", "fsdp", env=environment) for _ in range(2)
    ]
    done = [node.finish(100) for node in nodes]
    assert [node.returncode for node in done] == [0, 0], done
    printed = "".join(node.stdout for node in done)
    assert "fsdp: 4 ranks" in printed
    assert printed.count(" at step 0, ") == 1  # rank 0 speaks for all
    alone = python(*program, check=True).stdout
    assert losses(printed) == pytest.approx(losses(alone), abs=1.5e-3)  # three digits are printed
    assert losses(alone)[0] - losses(alone)[1] > 0.01


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_on_two_processes_and_the_run_goes_on(python, tmp_path):
    run = ["-m", "labsupport.cli", *TRAIN, "--parallel", "ddp", "--processes", 2]
    run += ["--decay-steps", 10**6, "--warmup-steps", 2, "--steps"]
    started = python.start(*run, 10**6, "--folder", tmp_path / "run")
    while not (tmp_path / "run" / ".lock").exists():
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)
    done = started.finish(200)
    assert done.returncode == 0, done
    steps = int(re.search(r"stopped by SIGTERM after (\d+) of", done.stdout)[1])
    assert (tmp_path / "run" / f"step-{steps:06}").is_dir()
    curves = []
    for folder in (tmp_path / "run", tmp_path / "whole"):
        python(*run, steps + 3, "--folder", folder, check=True, timeout=200)
        curves.append(pd.read_csv(folder / "history.csv").loss.tolist())
    assert curves[0] == curves[1]
    assert len(curves[0]) == steps + 3


@pytest.mark.parametrize(
    ("error", "traceback"), [("RuntimeError('a bug')", True), ("ValueError('a refusal')", False)]
)
def test_a_rank_that_fails_says_why_and_ends_the_others(error, traceback, python, tmp_path):
    """Two nodes, started by hand as torchrun starts them, but nobody ends the other rank."""
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(error=error))
    port, environment = port_and_environment()
    environment |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        python.start(script, *TRAIN, "--parallel", "ring", env=environment | {"RANK": str(rank)})
        for rank in range(2)
    ]
    zero, one = (rank.finish() for rank in ranks)
    assert (zero.returncode, one.returncode) == (1, 1)
    assert f"labsupport: rank 1: a {'bug' if traceback else 'refusal'}" in one.stderr
    assert ("in broken" in one.stderr) is traceback
    assert "Traceback" not in zero.stderr
