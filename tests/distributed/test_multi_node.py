"""Several nodes: torchrun is started once for each, here all on this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

LIMIT_S = 60
TRAIN = [
    *("-m", "labsupport.cli", "train", "--layers", "1", "--width", "32", "--heads", "2"),
    *("--length", "254", "--data", "records", "--steps", "3", "--accumulation", "4"),
    *("--learning-rate", "3e-3", "--device", "cpu", "--quiet"),
]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rendezvous(backend, node, port):
    if backend == "static":
        return ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"127.0.0.1:{port}"]


def run_nodes(backend, each, arguments, project):
    """What two nodes print, and their exit codes; nothing of them is left."""
    # What an outer run has set would be taken for this one's.
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    port = free_port()
    start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    nodes = [
        subprocess.Popen(
            [*start, "--nproc-per-node", str(each), *rendezvous(backend, node, port), *arguments],
            cwd=project,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for node in range(2)
    ]
    try:
        printed = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    return printed, [node.returncode for node in nodes]


def run_alone(project):
    done = subprocess.run(
        [sys.executable, *TRAIN], cwd=project, capture_output=True, text=True, timeout=LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    return done.stdout


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
    printed, codes = run_nodes(backend, each, [*TRAIN, "--parallel", parallel], project)
    assert codes == [0, 0], "\n".join(printed)
    together = "".join(printed)
    assert f"{parallel}: {2 * each} ranks" in together
    assert together.count(" at step 0, ") == 1  # rank 0 speaks for all
    alone = losses(run_alone(project))
    assert len(alone) == 2
    assert losses(together) == pytest.approx(alone, abs=1.5e-3)  # three digits are printed
    assert alone[0] - alone[1] > 0.01


@pytest.mark.slow
def test_a_rank_that_fails_on_one_node_ends_the_run_on_both(project, tmp_path):
    script = tmp_path / "work.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "from labsupport.distributed import setup_ddp\n"
        "place = setup_ddp('gloo')\n"
        "if place.rank == 1:\n"
        "    raise ValueError('rank one is unwell')\n"
        "place.wait_for_all()\n"
    )
    printed, codes = run_nodes("static", 1, [str(script)], project)
    assert 0 not in codes
    assert "rank one is unwell" in "".join(printed)
