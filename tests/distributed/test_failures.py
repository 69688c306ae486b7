"""Bugs show their traceback; errors that explain themselves do not. Under torchrun, too."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from labsupport.commands.ring import _in_every_process
from labsupport.distributed.failures import is_lost, short
from labsupport.distributed.launch import LaunchError
from labsupport.distributed.ring_check import advice

LIMIT_S = 100
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


@pytest.mark.parametrize(
    ("what", "explained"),
    [
        ("ValueError: no preset", True),
        ("labsupport.attention.inputs.AttentionInputError: no", True),
        ("torch.OutOfMemoryError: with\nits remedies", True),
        ("RuntimeError: shapes do not fit", False),
        ("KeyError: 'ValueError'", False),  # only its name counts, not what it says
        ("json.JSONDecodeError: a ValueError of another kind", False),
    ],
)
def test_an_error_that_explains_itself_comes_without_a_traceback(what, explained):
    start = f"rank 1 of 2 failed: {what}"
    text = short(LaunchError(f"{start}\n\nTraceback (most recent call last):\n  ...", 1))
    assert text.startswith(f"labsupport: {start}")
    assert ("Traceback" in text) is not explained


def test_a_lost_connection_is_no_cause_but_a_bug_that_led_to_it_is():
    lost = RuntimeError("[gloo] Connection closed by peer")
    assert is_lost(lost)
    assert not is_lost(RuntimeError("shapes do not fit"))
    lost.__cause__ = ValueError("the loss is negative")
    assert not is_lost(lost)


@pytest.mark.parametrize(
    ("text", "helps"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate", "fewer tokens"),
        ("OutOfResources: out of resource: shared memory", "tune"),
        ("DistNetworkError: The server socket ... EADDRINUSE", "--standalone"),
        ("DistBackendError: NCCL error in: ...", "NCCL_DEBUG"),
        ("RuntimeError: PassManager::run failed", "~/.triton/cache"),
        ("something else in flash_triton", None),
    ],
)
def test_known_errors_come_with_advice(text, helps):
    assert (advice(text) or "").count(helps or "?") == bool(helps)


def that_is_broken():
    raise ArithmeticError("a bug")


def test_a_command_shows_the_traceback_of_a_rank_in_lines(capfd):
    import typer

    with pytest.raises(typer.Exit) as ended:
        _in_every_process(that_is_broken, {}, "gloo", 1, 20.0)
    assert ended.value.exit_code == 1
    first, *rest = capfd.readouterr().err.splitlines()
    assert first == "labsupport: rank 0 of 1 failed: ArithmeticError: a bug"
    assert "Traceback (most recent call last):" in rest


# --- several nodes: torchrun is started once for each, here all on this machine -------------------


def run_nodes(backend, each, arguments, project):
    """Return what two nodes print, and their exit codes; nothing of them is left."""
    # What an outer run has set would be taken for this one's.
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meet = ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    nodes = []
    for node in range(2):
        if backend == "static":
            meet = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port]
        run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        nodes.append(
            subprocess.Popen(
                [*run, "--nproc-per-node", str(each), *meet, *arguments],
                cwd=project,
                env=kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        printed = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    return "".join(printed), [node.returncode for node in nodes]


def losses(text):
    return [float(loss) for loss in re.findall(r"([\d.]+) at step", text)]


@pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX's")
@pytest.mark.parametrize(
    ("backend", "each", "parallel"),
    [
        ("static", 1, "ddp"),
        pytest.param("c10d", 1, "ring", marks=pytest.mark.slow),
        pytest.param("static", 2, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_two_nodes_take_the_steps_of_one_process(backend, each, parallel, project):
    program = ["-m", "labsupport.cli", *TRAIN]
    printed, codes = run_nodes(backend, each, [*program, "--parallel", parallel], project)
    assert codes == [0, 0], printed
    assert f"{parallel}: {2 * each} ranks" in printed
    assert printed.count(" at step 0, ") == 1  # rank 0 speaks for all
    alone = subprocess.run(
        [sys.executable, *program], cwd=project, capture_output=True, text=True, timeout=LIMIT_S,
        check=True,
    ).stdout  # fmt: skip
    assert len(losses(alone)) == 2
    assert losses(printed) == pytest.approx(losses(alone), abs=1.5e-3)  # three digits are printed
    assert losses(alone)[0] - losses(alone)[1] > 0.01


@pytest.mark.parametrize(
    ("error", "traceback"),
    [
        ("RuntimeError('a bug')", True),
        pytest.param("ValueError('a refusal')", False, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_on_one_node_ends_the_run_on_both(error, traceback, project, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(error=error))
    arguments = [str(script), *TRAIN, "--parallel", "ring"]
    printed, codes = run_nodes("static", 1, arguments, project)
    assert 0 not in codes
    message = f"labsupport: rank 1: a {'bug' if traceback else 'refusal'}"
    assert message in printed
    before = printed.partition(message)[0]
    assert ("in broken" in before) is traceback
