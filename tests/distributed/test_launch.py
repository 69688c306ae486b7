"""The launcher: what comes back, how failures are told, and that no process is ever left."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest
import torch
import torch.distributed as dist

from labsupport.distributed.failures import is_lost, short
from labsupport.distributed.launch import LaunchError, launch
from tests.fresh import wait_for

# Processes of this machine's loopback only. Most of a start is `import torch`.


def fail_on_one():
    """Rank 1 closes its connections before anybody knows why."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        try:
            raise ValueError("rank one is unwell")
        finally:
            dist.destroy_process_group()
    dist.all_reduce(torch.ones(1))


def kill_one():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def end():
    if os.environ["RANK"] == "1":
        time.sleep(300)
    print("the last words", flush=True)
    os._exit(3)


def nap(file=None):
    """Sleep, and leave a process behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    if file is not None:
        with open(f"{file}.part", "w") as out:
            out.write(f"{os.getpid()} {child.pid}")
        os.rename(f"{file}.part", file)
    time.sleep(300)


def oversleep(file):
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        nap(file)
    dist.all_reduce(torch.ones(1))


pytestmark = pytest.mark.usefixtures("nobody_is_left")


def test_each_rank_returns_its_result_and_rank_0_is_shown_as_it_comes(capfd):
    offset = 2.0

    def add(start, *, step):
        """Each rank's number, added up over the ranks; the group is left open."""
        dist.init_process_group("gloo")
        total = torch.tensor(offset + start + step * dist.get_rank())
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print("progress", end="\r", file=sys.stderr)
        print(f"rank {dist.get_rank()} says Größe\n" * 2_000, end="")
        timeout = dist.distributed_c10d._get_default_timeout("gloo").total_seconds()
        return float(total), os.environ["OMP_NUM_THREADS"], timeout

    share = max(1, torch.get_num_threads() // 2)
    result = launch(add, (1,), {"step": 10}, timeout=7)
    assert result == [(16.0, str(share), 7.0)] * 2
    assert capfd.readouterr().out == "progress\r" + "rank 0 says Größe\n" * 2_000


@pytest.mark.slow
def test_an_exception_on_rank_1_is_the_error_and_not_what_it_does_to_rank_0():
    with pytest.raises(LaunchError) as caught:
        launch(fail_on_one)
    assert caught.value.rank == 1
    assert "rank 1 of 2 failed: ValueError: rank one is unwell" in str(caught.value)
    assert "in fail_on_one" in caught.value.traceback
    assert "in _work" not in caught.value.traceback


@pytest.mark.slow
def test_a_rank_that_ends_is_named_with_its_last_words():
    for function, said in ((kill_one, "rank 1 of 2 failed: killed by SIGKILL"),
                           (end, "rank 0 of 2 failed: ended with exit code 3")):  # fmt: skip
        with pytest.raises(LaunchError, match=said) as caught:
            launch(function)
    assert "the last words" in str(caught.value)


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_collective_is_named_and_where_it_is(tmp_path):
    with pytest.raises(LaunchError, match="rank 1 of 2 did not reach a collective") as caught:
        launch(oversleep, (str(tmp_path / "pids"),), timeout=2)
    assert caught.value.rank == 1
    assert "in nap" in str(caught.value)  # where rank 1 was
    assert "all_reduce" in caught.value.traceback  # where rank 0 waited
    assert_gone(map(int, (tmp_path / "pids").read_text().split()))


@pytest.mark.slow
def test_no_process_is_left_when_the_launcher_is_killed(tmp_path, python):
    file = tmp_path / "pids"
    code = f"from {__name__} import launch, nap; launch(nap, ({str(file)!r},), processes=1)"
    launcher = python.start("-c", code)
    wait_for(file.exists)
    launcher.send_signal(signal.SIGKILL)
    launcher.finish()
    rank, theirs = map(int, file.read_text().split())
    assert_gone([rank])
    os.kill(theirs, signal.SIGKILL)  # started by a rank: nobody could tell


def assert_gone(pids):
    pids = list(pids)
    wait_for(lambda: not any(map(alive, pids)))


def alive(pid):
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_cannot_run_is_refused_before_anything_starts():
    for options, error, message in (
        ({"processes": 0}, ValueError, "at least 1"),
        ({"processes": 10_000, "device": "cuda"}, ValueError, "as many GPUs"),
        ({"device": "tpu"}, ValueError, "must be"),
        ({"args": (sys._getframe(),)}, TypeError, "sent to another process"),
    ):
        with pytest.raises(error, match=message):
            launch(nap, **options)


# --- failures of a rank, under torchrun too -------------------------------------------------------

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TRAIN = [
    *("train", "--preset", "1x32", "--length", "254", "--data", "records", "--device", "cpu"),
    *("--steps", "3", "--accumulation", "4", "--learning-rate", "3e-3"),
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
    # Below the ports that the system gives to other tests between now and the program's start.
    with socket.create_server(("127.0.0.1", random.randint(20_000, 32_000))) as free:
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
    assert "shared by 4 ranks" in printed
    assert printed.count(" at step 0, ") == 1  # rank 0 speaks for all
    alone = python(*program, check=True).stdout
    assert losses(printed) == pytest.approx(losses(alone), abs=1.5e-3)  # three digits are printed
    assert losses(alone)[0] - losses(alone)[1] > 0.01


@pytest.mark.slow
def test_sigterm_saves_a_checkpoint_on_two_processes_and_the_run_goes_on(python, tmp_path):
    run = ["-m", "labsupport.cli", *TRAIN, "--parallel", "ddp", "--processes", 2, "--steps", 400]
    started = python.start(*run, "--folder", tmp_path / "run")
    while not (tmp_path / "run" / ".lock").exists():
        time.sleep(0.01)
    started.send_signal(signal.SIGTERM)
    done = started.finish(200)
    assert done.returncode == 0, done
    steps = int(re.search(r"stopped by SIGTERM after (\d+) of", done.stdout)[1])
    assert (tmp_path / "run" / f"step-{steps:06}").is_dir()
    curves = []
    for folder in (tmp_path / "run", tmp_path / "whole"):
        python(*run, "--folder", folder, check=True, timeout=200)
        curves.append(pd.read_csv(folder / "history.csv").loss.tolist())
    assert curves[0] == curves[1]
    assert len(curves[0]) == 400 > steps


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
