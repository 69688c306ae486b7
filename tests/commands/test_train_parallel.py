"""`labsupport train --parallel`, and what happens when one of its processes is killed."""

import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from typer.testing import CliRunner

from labsupport.cli import app
from labsupport.distributed.data_parallel import (
    cleanup_ddp,
    setup_ddp,
    share_of,
    train_with_ddp,
    train_with_fsdp,
)
from labsupport.distributed.launch import LaunchError, launch
from labsupport.distributed.sequence_parallel import train_with_ring
from labsupport.training import Decoder, DecoderConfig, MemoryOptions, TrainConfig, train

SMALL = ["--layers", 1, "--width", 32, "--heads", 2, "--length", 254, "--data", "records"]


def program(*arguments, ok=True, env=None):
    command = ["train", *SMALL, "--device", "cpu", "--quiet", *arguments]
    done = CliRunner().invoke(app, list(map(str, command)), env=env)
    if ok:
        assert done.exit_code == 0, (done.output, done.exception)
    return done


@pytest.fixture(autouse=True)
def nobody_is_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (["ring"], r"ring: 2 ranks, each with 128 tokens of every sequence \(zigzag shards\)"),
        pytest.param(
            ["ring", "--contiguous", "--attention", "native", "--loss-chunk", 50],
            r"127 tokens of every sequence \(contiguous shards\)(?s:.*)native ran on 2 ranks",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["fsdp", "--cpu-offload"],
            r"fsdp: 2 ranks, 1.5 sequences a step for each; 1/2 of the model on each, in the CPU's",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["ddp", "--checkpoint-layers"],
            "ddp: 2 ranks, 1.5 sequences a step for each; the whole model on each",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_processes_take_the_steps_of_one(parallel, said, tmp_path):
    course = ["--steps", 3, "--accumulation", 3, "--learning-rate", 3e-3]
    folder = ["--folder", tmp_path / "two", "--processes", 2]
    done = program(*course, *folder, "--parallel", *parallel)
    program(*course, "--folder", tmp_path / "one")
    two, one = (pd.read_csv(tmp_path / name / "history.csv") for name in ("two", "one"))
    assert two["loss"].tolist() == pytest.approx(one["loss"].tolist(), rel=1e-5)
    assert two["grad_norm"].tolist() == pytest.approx(one["grad_norm"].tolist(), rel=1e-4)
    assert two["loss"].is_monotonic_decreasing
    assert two["tokens"].tolist() == one["tokens"].tolist()  # what fills a ring's shards up is none
    assert re.search(said, done.stdout), done.stdout
    assert re.search(r"each rank  peak [\d.]+ MiB, [\d.]+ MiB\n", done.stdout)
    assert (tmp_path / "two" / "step-000003" / "run.json").exists()
    # The folder is a run of several processes now, and goes on as such only.
    refused = program(*course, "--folder", tmp_path / "two", ok=False)
    assert "holds a run of several processes" in str(refused.exception)
    refused = program(
        *course, "--folder", tmp_path / "one", "--parallel", "ring", "--processes", 2, ok=False
    )
    assert "holds a run of one process" in str(refused.exception)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory_limit is Linux's")
def test_out_of_memory_names_the_rank_and_the_remedies():
    done = program(
        *("--parallel", "ring", "--processes", 2, "--length", "16K", "--steps", 1),
        *("--memory-limit", "1500MiB", "--width", 2048, "--attention", "native"),
        ok=False,
    )
    assert done.exit_code == 1
    assert re.search(r"rank \d of 2 failed: .*out of memory: .*limit of 1\.5 GiB", done.stderr), (
        done.stderr
    )
    assert "1. --loss-chunk 1024" in done.stderr
    assert "Traceback" not in done.stderr


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
RING = ["--parallel", "ring", "--processes", 2]
DDP = ["--parallel", "ddp", "--processes", 2]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--parallel", "pipeline"], "unknown --parallel 'pipeline'; known: ddp, fsdp, ring"),
        (["--processes", 2], "--processes goes with --parallel ddp, fsdp or ring"),
        (["--contiguous"], "--contiguous goes with --parallel ring"),
        ([*DDP, "--contiguous"], "--contiguous goes with --parallel ring"),
        ([*DDP, "--cpu-offload"], "--cpu-offload goes with --parallel fsdp"),
        (["--parallel", "ring"], "how many processes?"),
        pytest.param(
            [*DDP, "--device", "cuda"],
            "--device cuda: each rank needs a GPU, and none is there",
            marks=NO_GPU,
        ),
        pytest.param(
            ["--parallel", "ring", "--device", "cuda"],
            "--device cuda: each rank needs a GPU",
            marks=NO_GPU,
        ),
        ([*RING, "--policy", "bfloat16"], "neither --policy nor float16"),
        ([*RING, "--dtype", "float16"], "neither --policy nor float16"),
        ([*RING, "--data", "source"], "packs several documents into a sequence"),
        ([*RING, "--attention", "sdpa_flash"], "--attention 'sdpa_flash': a ring has auto, "),
        ([*DDP, "--attention", "flesh"], "flesh"),
        ([*RING, "--device", "cuda:1"], "with --parallel it is cpu or cuda"),
        ([*RING, "--preset", "huge"], "no preset 'huge'"),
        (DDP, "--accumulation 1 gives 2 ranks 1 of the sequences"),
    ],
)
def test_options_that_make_no_sense_together_are_refused_by_a_sentence(wrong, told):
    done = program(*wrong, ok=False)
    assert done.exit_code == 1
    assert isinstance(done.exception, ValueError)
    assert told in str(done.exception)


def test_a_kernel_that_cannot_is_refused_without_a_traceback():
    done = program(*RING, "--attention", "cudnn", ok=False)
    assert done.exit_code == 1
    first, *rest = done.stderr.splitlines()
    assert re.match(r"labsupport: rank \d of 2 failed: .*BackendUnavailableError: kernel", first)
    assert "runs on cuda, not on cpu" in done.stderr
    assert "Kernels that can: native, flash_triton, flash_torch" in rest[-1]


def test_control_c_without_a_folder_says_what_would_have_been_kept():
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.0)  # its processes still import PyTorch
    try:
        done = program(*RING, ok=False)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done.exit_code == 130
    assert done.stderr.strip() == (
        "stopped; --folder FOLDER would keep checkpoints, from which a run goes on"
    )


def test_torchrun_has_chosen_the_number_of_processes():
    done = program(*RING, ok=False, env={"RANK": "0", "WORLD_SIZE": "4"})
    assert "torchrun has started 4 processes: leave --processes out" in str(done.exception)


def test_documents_that_see_one_another_are_another_course(tmp_path):
    texts = ["--data", "topics", "--steps", 2, "--length", 8000, "--folder", tmp_path]
    program(*texts, "--join-documents")
    joined = pd.read_csv(tmp_path / "history.csv")["loss"]
    refused = program(*texts, ok=False)
    assert "joined was True and is None" in str(refused.exception)
    program(*texts, "--fresh")
    apart = pd.read_csv(tmp_path / "history.csv")["loss"]
    assert joined[0] == apart[0]  # one long text
    assert 1e-7 < abs(joined[1] / apart[1] - 1) < 0.01  # the same texts, four of them


# --- a rank that is killed ------------------------------------------------------------------------

CONFIG = DecoderConfig(vocab_size=31, width=16, layers=2, heads=2)
SETTINGS = TrainConfig(4, 1e-2, gradient_accumulation_steps=2, checkpoint_every=2)
HOW = {
    "ring": train_with_ring,
    "ddp": lambda model, batches, *args, **options: train_with_ddp(
        model, share_of(batches, setup_or_current()), *args, **options
    ),
    "fsdp": lambda model, batches, *args, **options: train_with_fsdp(
        model, share_of(batches, setup_or_current()), *args, **options
    ),
}


def setup_or_current():
    from labsupport.distributed.data_parallel import RankInfo

    return RankInfo.current()


def model():
    torch.manual_seed(0)
    return Decoder(CONFIG, MemoryOptions(checkpoint=True)).double()


def batches(step):
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(31, (1, 18), generator=generator) for _ in range(2)]
    return [{"tokens": row[:, :-1], "labels": row[:, 1:]} for row in rows]


def train_and_die(how, where, folder):
    """Rank 1 ends in the third step, or in writing the fourth step's checkpoint."""
    place = setup_ddp()
    torch.set_num_threads(1)
    own, done = model(), []
    last: Any = own.blocks[1]

    def die(*_):
        if place.rank == 1 and len(done) == 2:
            Path(folder, "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def on_file(event, args):
        if event == "open" and "partial-000004" in str(args[0]) and place.rank == 1:
            del done[2:]
            die()

    if where == "forward":
        last.mlp.register_forward_hook(die)
    elif where == "backward":
        # Behind the second block's ring, and before the first one's.
        last.attention_norm.register_full_backward_hook(die)
    else:
        sys.addaudithook(on_file)
    HOW[how](own, batches, SETTINGS, folder=f"{folder}/run", on_step=done.append, progress=False)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("ring", "forward"),
        ("ring", "backward"),
        ("ring", "checkpoint"),
        *(
            pytest.param(how, where, marks=pytest.mark.slow)
            for how in ("ddp", "fsdp")
            for where in ("forward", "backward", "checkpoint")
        ),
    ],
)
def test_a_killed_rank_ends_the_run_which_goes_on_from_the_checkpoint(how, where, tmp_path):
    with pytest.raises(LaunchError, match="rank 1 of 2 failed: killed by SIGKILL") as caught:
        launch(train_and_die, (how, where, str(tmp_path)), timeout=60, device="cpu")
    assert time.time() - float((tmp_path / "killed").read_text()) < 30
    assert caught.value.rank == 1
    folder = tmp_path / "run"
    assert [path.name for path in folder.glob("step-*")] == ["step-000002"]
    assert bool(list(folder.glob("partial-*"))) == (where == "checkpoint")
    setup_ddp("gloo")
    try:
        resumed = model()
        steps: list[int] = []
        run = HOW[how](
            *(resumed, batches, SETTINGS),
            folder=folder,
            on_step=lambda row: steps.append(row.step),
            progress=False,
        )
    finally:
        cleanup_ddp()
    assert steps == [2, 3]
    history = train(model(), batches, replace(SETTINGS, checkpoint_every=None), progress=False)
    assert run.history.losses == pytest.approx(history.losses, rel=1e-12)
    assert sorted(path.name for path in folder.glob("*-*")) == ["step-000002", "step-000004"]
