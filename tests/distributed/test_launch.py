"""The launcher: what comes back, how failures are told, and that no process is ever left."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from labsupport.distributed.launch import LaunchError, launch

# Processes of this machine's loopback only. Most of a start is `import torch`.


def add(start, *, step):
    """Each rank's number, added up over the ranks; the group is left open."""
    dist.init_process_group("gloo")
    total = torch.tensor(float(start + step * dist.get_rank()))
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("progress", end="\r", file=sys.stderr)
    print(f"rank {dist.get_rank()} says Größe\n" * 20_000, end="")
    timeout = dist.distributed_c10d._get_default_timeout("gloo").total_seconds()
    return float(total), os.environ["OMP_NUM_THREADS"], torch.get_num_threads(), timeout


def fail_on_one(closed):
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        try:
            raise ValueError("rank one is unwell")
        finally:
            if closed:
                dist.destroy_process_group()
    dist.all_reduce(torch.ones(1))


def end_one(how):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        print("the last words", flush=True)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def nap():
    time.sleep(300)


def oversleep():
    """Rank 1 sleeps, and leaves its work to a process of its own."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        nap()
    dist.all_reduce(torch.ones(1))


def never_come():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.init_process_group("gloo")


def wait_forever(folder):
    dist.init_process_group("gloo")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    print("early", flush=True)
    nap()


@pytest.fixture(autouse=True)
def nobody_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def test_each_rank_returns_its_result_and_rank_0_is_shown_as_it_comes(capfd):
    share = max(1, torch.get_num_threads() // 2)
    result = launch(f"{__name__}:add", (1,), {"step": 10}, timeout=7)
    assert result == [(12.0, str(share), share, 7.0)] * 2
    assert capfd.readouterr().out == "progress\r" + "rank 0 says Größe\n" * 20_000


def test_a_function_of_this_moment_is_sent_and_environment_variables_can_be_set():
    offset = 2.0
    (result,) = launch(
        lambda: offset + int(os.environ["OMP_NUM_THREADS"]),
        processes=1, device="cpu", env={"OMP_NUM_THREADS": "3"},
    )  # fmt: skip
    assert result == 5.0


@pytest.mark.parametrize("closed", [False, True])
def test_an_exception_on_rank_1_is_the_error_and_not_what_it_does_to_rank_0(closed):
    with pytest.raises(LaunchError) as caught:
        launch(fail_on_one, (closed,))
    assert caught.value.rank == 1
    assert "rank 1 of 2 failed: ValueError: rank one is unwell" in str(caught.value)
    assert "in fail_on_one" in caught.value.traceback
    assert "in _work" not in caught.value.traceback


@pytest.mark.parametrize(
    ("how", "message"), [("killed", "killed by SIGKILL"), ("exited", "ended with exit code 3")]
)
def test_a_rank_that_dies_in_the_middle_is_named_with_its_last_words(how, message):
    with pytest.raises(LaunchError) as caught:
        launch(end_one, (how,))
    assert caught.value.rank == 1
    assert f"rank 1 of 2 failed: {message}" in str(caught.value)
    assert "the last words" in str(caught.value)


def test_a_rank_that_does_not_come_to_a_collective_is_named_and_where_it_is():
    began = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 of 2 did not come to a collective") as caught:
        launch(oversleep, timeout=2)
    assert caught.value.rank == 1
    assert "in nap" in str(caught.value)  # where rank 1 was
    assert "all_reduce" in caught.value.traceback  # where rank 0 waited
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_rank_that_never_joins_the_group_is_named():
    with pytest.raises(LaunchError, match="rank 1 of 2 did not come"):
        launch(never_come, timeout=2)


@pytest.mark.slow
def test_a_run_over_its_limit_is_ended_and_says_where_the_ranks_were(tmp_path):
    with pytest.raises(LaunchError, match="not done after 6 s") as caught:
        launch(wait_forever, (str(tmp_path),), limit=6)
    assert caught.value.rank is None
    assert str(caught.value).count("in nap") == 2


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_no_process_is_left_when_the_launcher_is_interrupted_or_killed(tmp_path, how):
    code = f"from labsupport.distributed.launch import launch; launch('{__name__}:wait_forever', "
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"{code}({str(tmp_path)!r},))"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "early\n"
    noted, limit = [tmp_path / "0", tmp_path / "1"], time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in noted):
        assert time.monotonic() < limit
        time.sleep(0.05)
    pids = [[int(pid) for pid in path.read_text().split()] for path in noted]
    ranks, theirs = zip(*pids, strict=True)
    if how == "interrupted":
        os.killpg(launcher.pid, signal.SIGINT)  # to the whole foreground group, as a terminal does
        assert "KeyboardInterrupt" in launcher.communicate(timeout=30)[1]
        assert_gone([*ranks, *theirs])
    else:
        launcher.kill()
        launcher.communicate(timeout=30)
        assert_gone(ranks)
        for pid in filter(alive, theirs):  # started by a rank: nobody could tell
            os.kill(pid, signal.SIGKILL)


def assert_gone(pids):
    limit = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid):
    """Whether a process runs; one that nobody has asked for its exit code does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"processes": 0}, ValueError, "at least 1"),
        ({"timeout": 0}, ValueError, "above 0"),
        ({"processes": 10_000, "device": "cuda"}, ValueError, "as many GPUs"),
        ({"device": "tpu"}, ValueError, "must be"),
        ({"args": (sys._getframe(),)}, TypeError, "sent to another process"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(options, error, message):
    with pytest.raises(error, match=message):
        launch(nap, **options)
