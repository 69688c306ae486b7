"""The launcher: what runs, how failures are told, and that no process is ever left."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch

from labsupport.distributed.launch import LaunchError, launch

# Processes of this machine's loopback only. Half of a start is `import torch`.
WORK = '''
import os, signal, subprocess, sys, time
import torch
import torch.distributed as dist


def add(start, *, step):
    """Each rank's number, added up over the ranks."""
    dist.init_process_group("gloo")
    total = torch.tensor(float(start + step * dist.get_rank()))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def forget_to_clean_up():
    dist.init_process_group("gloo")
    return dist.get_rank()


def fail_on_one(where):
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if where == "with the group closed":
            try:
                raise ValueError("rank one is unwell")
            finally:
                dist.destroy_process_group()
        raise ValueError("rank one is unwell")
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


def oversleep():
    """Rank 1 sleeps, and leaves its work to a process of its own."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        nap()
    dist.all_reduce(torch.ones(1))


def nap():
    time.sleep(300)


def never_come():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.init_process_group("gloo")


def wait_forever(folder):
    dist.init_process_group("gloo")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open(f"{folder}/{dist.get_rank()}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    nap()


def talk(lines):
    if os.environ["RANK"] == "0":
        print("progress 1", end="\\r", file=sys.stderr)
    for line in range(lines):
        print(f"rank {os.environ['RANK']} says {line:06} Größe")
    print("no newline", end="")


def stay():
    import threading
    threading.Thread(target=nap).start()
'''


@pytest.fixture
def work(tmp_path):
    path = tmp_path / "work.py"
    path.write_text(WORK)
    return path


@pytest.fixture(autouse=True)
def nobody_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def test_each_rank_returns_its_result_and_has_its_share_of_the_threads(work):
    share = max(1, torch.get_num_threads() // 2)
    assert launch(f"{work}:add", (1,), {"step": 10}) == [(12.0, str(share), share)] * 2


def test_a_group_that_was_left_open_is_closed_and_told(work, capfd):
    assert launch(f"{work}:forget_to_clean_up") == [0, 1]
    assert "left open" in capfd.readouterr().out


def test_one_process_is_a_group_too_and_environment_variables_can_be_set(work):
    (got,) = launch(f"{work}:add", (1,), {"step": 10}, processes=1, env={"OMP_NUM_THREADS": "2"})
    assert got == (1.0, "2", 2)


def test_a_script_runs_as_under_torchrun_with_its_arguments(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from datetime import timedelta\n"
        "import torch.distributed as dist\n"
        "from torch.distributed.distributed_c10d import _get_default_timeout\n"
        "dist.init_process_group()\n"
        "print(__name__, sys.argv[1:], dist.get_rank(), dist.get_world_size(), "
        "os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'], "
        "_get_default_timeout('gloo').total_seconds())\n"
        "dist.destroy_process_group()\n"
        "sys.exit(0)\n"
    )
    assert launch(script, ["--steps", 3], timeout=7) == [None, None]
    assert capfd.readouterr().out == "__main__ ['--steps', '3'] 0 2 0 2 7.0\n"


@pytest.mark.slow
def test_the_command_line_runs_a_script_and_says_by_its_code_whether_it_failed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('given', sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n")
    command = [sys.executable, "-m", "labsupport.distributed.launch", "--processes", "1", script]
    for code in ("0", "4"):
        ran = subprocess.run([*command, code, "--x"], capture_output=True, text=True, timeout=60)
        assert f"given ['{code}', '--x']" in ran.stdout
        assert ran.returncode == (0 if code == "0" else 1)
        assert ("rank 0 of 1 failed: SystemExit: 4" in ran.stderr) == (code == "4")


@pytest.mark.parametrize("where", ["with the group open", "with the group closed"])
def test_an_exception_on_rank_1_is_the_error_and_not_what_it_does_to_rank_0(work, where):
    with pytest.raises(LaunchError) as caught:
        launch(f"{work}:fail_on_one", (where,))
    assert caught.value.rank == 1
    assert "rank 1 of 2 failed: ValueError: rank one is unwell" in str(caught.value)
    assert "in fail_on_one" in caught.value.traceback
    assert "worker.py" not in caught.value.traceback


@pytest.mark.parametrize(
    ("how", "said"), [("killed", "killed by SIGKILL"), ("exited", "ended with exit code 3")]
)
def test_a_rank_that_dies_in_the_middle_is_named_with_its_last_words(work, how, said):
    with pytest.raises(LaunchError) as caught:
        launch(f"{work}:end_one", (how,))
    assert caught.value.rank == 1
    assert f"rank 1 of 2 failed: {said}" in str(caught.value)
    assert "the last words" in str(caught.value)


def test_a_rank_that_does_not_come_to_a_collective_is_named_and_where_it_is(work):
    began = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 of 2 did not come to a collective") as caught:
        launch(f"{work}:oversleep", timeout=2)
    assert caught.value.rank == 1
    assert "in nap" in str(caught.value)  # where rank 1 was
    assert "in oversleep" in caught.value.traceback  # where rank 0 waited
    assert "all_reduce" in caught.value.traceback
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_rank_that_never_joins_the_group_is_named(work):
    with pytest.raises(LaunchError, match="rank 1 of 2 did not come") as caught:
        launch(f"{work}:never_come", timeout=2)
    assert "gave no answer" in str(caught.value)


@pytest.mark.slow
def test_a_run_over_its_limit_is_ended_and_says_where_the_ranks_were(work, tmp_path):
    with pytest.raises(LaunchError, match="limit of 6 s") as caught:
        launch(f"{work}:wait_forever", (str(tmp_path),), limit=6)
    assert caught.value.rank is None
    assert str(caught.value).count("in nap") == 2


def test_a_process_that_stays_when_its_work_is_done_is_ended_and_told(work, monkeypatch):
    from labsupport.distributed.launch import launch as module  # noqa: F401

    monkeypatch.setattr(sys.modules["labsupport.distributed.launch.launch"], "ENDING", 1.0)
    with pytest.raises(LaunchError, match=r"(?s)work is done, but .* still there.*in nap"):
        launch(f"{work}:stay", processes=1)


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_no_process_is_left_when_the_launcher_is_interrupted_or_killed(work, tmp_path, how):
    code = f"from labsupport.distributed.launch import launch; launch({f'{work}:wait_forever'!r}, "
    code += f"({str(tmp_path)!r},))"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    noted = [tmp_path / "0", tmp_path / "1"]
    limit = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in noted):
        assert launcher.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.05)
    pids = [[int(pid) for pid in path.read_text().split()] for path in noted]
    ranks, theirs = zip(*pids, strict=True)
    if how == "interrupted":
        os.killpg(launcher.pid, signal.SIGINT)  # to the whole foreground group, as a terminal does
        assert "KeyboardInterrupt" in launcher.communicate(timeout=30)[1]
        _assert_gone([*ranks, *theirs])
    else:
        launcher.kill()
        launcher.communicate(timeout=30)
        _assert_gone(ranks)
        for pid in filter(_alive, theirs):  # what a rank has started, nobody could tell
            os.kill(pid, signal.SIGKILL)


def _assert_gone(pids):
    limit = time.monotonic() + 5
    while any(map(_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(_alive, pids))


def _alive(pid):
    """Whether a process runs; one that nobody has asked for its exit code does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_many_lines_pass_and_only_those_of_rank_0_are_shown(work, capfd):
    launch(f"{work}:talk", (30_000,))
    out = capfd.readouterr().out
    assert out.startswith("progress 1\r")
    expected = "".join(f"rank 0 says {line:06} Größe\n" for line in range(30_000)) + "no newline"
    assert out.removeprefix("progress 1\r") == expected


def test_output_comes_while_the_run_goes_on(work, tmp_path):
    code = textwrap.dedent(f"""
        from labsupport.distributed.launch import launch
        open({str(tmp_path / "slow.py")!r}, "w").write(
            "import time\\nprint('early')\\ntime.sleep(300)"
        )
        launch({str(tmp_path / "slow.py")!r}, processes=1)
    """)
    launcher = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "early\n"
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)


def test_what_cannot_run_is_refused_before_anything_starts(work):
    with pytest.raises(ValueError, match="at least 1"):
        launch(work, processes=0)
    with pytest.raises(ValueError, match="above 0"):
        launch(work, timeout=0)
    with pytest.raises(ValueError, match="as many GPUs"):
        launch(work, processes=10_000, device="cuda")
    with pytest.raises(FileNotFoundError, match="no file"):
        launch("missing.py:train")
    with pytest.raises(ModuleNotFoundError, match="no module 'no_such_module'"):
        launch("no_such_module:train")
    with pytest.raises(TypeError, match=r"%%writefile"):
        launch(lambda: None)
    with pytest.raises(TypeError, match="name a function"):
        launch(work, kwargs={"steps": 1})
    with pytest.raises(TypeError, match="sent to another process"):
        launch(f"{work}:add", (lambda: 0,))


def test_a_function_that_is_not_there_is_told_by_its_rank(work):
    with pytest.raises(LaunchError, match="has no attribute 'absent'"):
        launch(f"{work}:absent", processes=1)
