"""What `labsupport ring` says when ranks fail, and what it reads off other programs."""

import signal

import pytest
import torch
import typer
from typer.testing import CliRunner

from labsupport.commands.ring import _in_every_process, ring_app
from labsupport.distributed.data_parallel import Place
from labsupport.distributed.ring_tools import cluster
from labsupport.distributed.ring_tools.trouble import advice


def command(*arguments):
    """Exit status, and what is printed."""
    result = CliRunner().invoke(ring_app, arguments)
    return result.exit_code, result.output


# --- ranks that fail ------------------------------------------------------------------------------


def test_a_rank_that_fails_shows_its_traceback_in_lines(capfd):
    """A bug, say: here what the ranks are to call is not there."""
    with pytest.raises(typer.Exit) as ended:
        _in_every_process(
            "labsupport.distributed.ring_tools.check:not_there", {}, processes=1, backend="gloo"
        )
    assert ended.value.exit_code == 1
    first, *rest = capfd.readouterr().err.splitlines()
    assert first.startswith("labsupport: rank 0 of 1 failed: AttributeError: ")
    assert "Traceback (most recent call last):" in rest


def test_a_rank_that_refuses_says_so_in_one_line(capfd):
    options = {"dtype": "float99"}
    with pytest.raises(typer.Exit):
        _in_every_process(
            "labsupport.distributed.ring_tools.bench:main", options, processes=1, backend="gloo"
        )
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("labsupport: rank 0 of 1 failed: ValueError: --dtype float99")


def test_control_c_says_where_the_rows_are(tmp_path):
    sizes = ["--seqlen", "4096", "--implementations", "flash_torch", "--processes", "1"]
    for rows, said in (
        (None, "--rows FILE would keep the rows"),
        ("r.csv", "r.csv holds the rows"),
    ):
        file = [] if rows is None else ["--rows", str(tmp_path / rows)]
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # its processes still import PyTorch
        try:
            status, text = command("bench", *sizes, *file)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert status == 130
        assert said in text


# --- what is read off other programs --------------------------------------------------------------


def test_links_are_read_off_nvidia_smi():
    text = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\t0-15\t0\nGPU1\tNV18\t X \tSYS\t0-15\t0\nGPU2\tSYS\tSYS\t X \t0\t0\n"
        "\nLegend:\n  X = Self\n"
    )
    assert cluster.matrix_of_links(text) == [
        "links: NV18 (18 NVLinks) for 2 of 6 directed pairs",
        "links: SYS (PCIe or the host's memory) for 4 of 6 directed pairs",
    ]
    assert cluster.matrix_of_links("nvidia-smi has failed") == []


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate", "fewer tokens"),
        ("OutOfResources: out of resource: shared memory", "tune"),
        ("DistNetworkError: The server socket ... EADDRINUSE", "--standalone"),
        ("DistBackendError: NCCL error in: ...", "NCCL_DEBUG"),
        ("RuntimeError: PassManager::run failed", "~/.triton/cache"),
    ],
)
def test_known_errors_come_with_advice(said, remedy):
    assert remedy in (advice(said) or "")
    assert advice("something else in flash_triton") is None


@pytest.mark.parametrize(
    ("name", "way"), [("lo", "lo, within this machine"), ("eth1", "eth1"), ("", "the network's")]
)
def test_the_interface_of_gloo_is_the_one_that_it_was_told(name, way, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    (line,) = cluster.links(Place(0, 2, torch.device("cpu")))
    assert f"travel over {way}" in line
