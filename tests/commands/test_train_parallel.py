"""`labsupport train --parallel`, run as the program runs it."""

import re
import shutil
import signal
import sys
from functools import partial

import pandas as pd
import pytest

from tests.commands.program import program

SMALL = ["--preset", "1x32", "--length", 126, "--data", "records"]


train = partial(program, "train", *SMALL, "--device", "cpu")


COURSE = ["--steps", 3, "--accumulation", 3, "--learning-rate", 3e-3]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("one")
    train(*COURSE, "--folder", folder)
    return folder


def on_a_rank(arguments):
    return train(*arguments).stdout


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (["ring", "--attention", "native", "--save-memory", "loss=50"],
         r"ring: each sequence shared by 2 ranks(?s:.*)native ran on 2 ranks"),
        pytest.param(
            ["fsdp", "--save-memory", "states"],
            "fsdp: sequences, and the model, shared by 2 ranks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["ddp", "--save-memory", "checkpoint"], "ddp: sequences shared by 2 ranks",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_two_ranks_under_torchrun_take_the_steps_of_one_process(
    pool, one, parallel, said, tmp_path
):
    arguments = [*COURSE, "--folder", tmp_path, "--parallel", *parallel]
    first, second = pool(2, joined=False).run(on_a_rank, arguments)
    alone, two = (pd.read_csv(folder / "history.csv") for folder in (one, tmp_path))
    for column, close in (("loss", 1e-5), ("grad_norm", 1e-4), ("validation_loss", 1e-5)):
        assert two[column].tolist() == pytest.approx(alone[column].tolist(), rel=close)
    assert two["tokens"].equals(alone["tokens"])  # what fills a ring's shards up is none
    assert re.search(said, first), first
    assert re.search(r"each rank  peak [\d.]+ MiB, [\d.]+ MiB\n", first)
    assert re.search(r"sample +['\"]The ", first)
    assert second == ""
    # One process goes on with the run of two.
    shutil.rmtree(tmp_path / "step-000003")
    train(*COURSE, "--folder", tmp_path)
    again = pd.read_csv(tmp_path / "history.csv")
    assert again["loss"].tolist() == pytest.approx(alone["loss"].tolist(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory_limit is Linux's")
def test_out_of_memory_names_the_rank_and_the_remedies(nobody_is_left):
    done = train(
        *("--parallel", "ring", "--processes", 1, "--length", "512K", "--steps", 1),
        *("--limit", "1500MiB", "--preset", "1x128", "--attention", "native"),
        ok=False,
    )
    assert done.exit_code == 1
    assert re.search(r"rank 0 of 1 failed: .*out of memory: .*limit of 1\.5 GiB", done.stderr)
    assert "1. --save-memory loss" in done.stderr
    assert "Traceback" not in done.stderr


def test_control_c_ends_all_processes_and_says_how_to_go_on(nobody_is_left):
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)  # its process still imports PyTorch
    try:
        done = train("--parallel", "ring", "--processes", 1, ok=False)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done.exit_code == 130
    assert done.stderr.strip() == "stopped; with --folder, the same command resumes"
