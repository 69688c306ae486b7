"""Checkpoints: whole or not there, and a killed run continues exactly."""

import os
import shutil
import signal
import warnings
from dataclasses import dataclass, replace

import pytest
import torch

from labsupport.precision import FlashAttentionConfig
from labsupport.training import (
    CheckpointError,
    Checkpoints,
    MemoryOptions,
    ResumeError,
    TrainConfig,
)
from labsupport.training.checkpoint import step_of
from tests.training.test_train import Tiny, batch, one, quiet

posix = pytest.mark.skipif(os.name != "posix", reason="SIGKILL is of POSIX systems")


def program(folder, last):
    """Train with dropout, print each step's numbers exactly, and be killed after the `last`."""

    def on_step(row):
        print(row.step, row.loss.hex(), row.grad_norm.hex(), row.validation_loss, flush=True)
        if row.step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    counts = {"gradient_accumulation_steps": 2, "checkpoint_every": 2}
    settings = TrainConfig(12, learning_rate=1e-2, warmup_steps=3, **counts)
    options = {"validation": [batch(99)], "folder": folder, "on_step": on_step}
    quiet(Tiny(3, 0.3), lambda step: [batch(2 * step), batch(2 * step + 1)], settings, **options)


# --- a killed run ---------------------------------------------------------------------------------


@pytest.mark.slow
@posix
def test_a_killed_run_resumes_bit_for_bit(python, tmp_path):
    def run(folder, last=-1, check=True):
        code = f"from {__name__} import program; program({str(folder)!r}, {last})"
        return python("-c", code, check=check)

    unbroken = run(tmp_path / "whole").stdout.splitlines()
    assert len(unbroken) == 12
    killed = run(tmp_path / "killed", 6, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout.splitlines() == unbroken[:7]
    # A checkpoint every 2 steps, the last one after 6 of them.
    assert run(tmp_path / "killed").stdout.splitlines() == unbroken[-6:]


# --- in one program -------------------------------------------------------------------------------


def test_a_run_that_is_asked_to_stop_saves_its_last_step_and_resumes_bit_for_bit(tmp_path):
    settings = TrainConfig(steps=6, checkpoint_every=3)
    answers = iter([False, False, False, True])
    stop = lambda: next(answers)  # noqa: E731
    stopped = quiet(Tiny(dropout=0.2), one, settings, folder=tmp_path, stop=stop)
    assert len(stopped) == 4
    assert [step_of(path) for path in Checkpoints(tmp_path).paths()] == [4, 3]
    resumed = quiet(Tiny(seed=9, dropout=0.2), one, settings, folder=tmp_path)
    whole = quiet(Tiny(dropout=0.2), one, settings)
    assert [row.loss for row in resumed] == [row.loss for row in whole]


@pytest.mark.parametrize("by", ["autocast", "policy"])
def test_float16_resumes_with_its_loss_scale_and_masters(tmp_path, by):
    how = {by: torch.float16 if by == "autocast" else FlashAttentionConfig.float16()}
    settings = TrainConfig(steps=10, decay_steps=10, **how)
    unbroken, model = Tiny(factor=30.0), Tiny(factor=30.0)
    whole = quiet(unbroken, one, settings)
    quiet(Tiny(factor=30.0), one, replace(settings, steps=2), folder=tmp_path)
    resumed = quiet(model, one, settings, folder=tmp_path)
    assert resumed.losses == whole.losses
    assert [row.skipped for row in resumed] == [row.skipped for row in whole]
    assert any(row.skipped for row in whole)
    assert ("master/head.weight" in Checkpoints(tmp_path).names()) == (by == "policy")
    pairs = zip(model.parameters(), unbroken.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


@dataclass(frozen=True)
class Config:
    rope_base: float


def shaped(base=1e4, residual=None, classes=13):
    model = Tiny()
    model.config, model.savings = Config(base), MemoryOptions(residual=residual)
    model.head = torch.nn.Linear(16, classes)
    return model


@pytest.mark.parametrize(
    ("settings", "model", "run_config", "message"),
    [
        ({"betas": (0.9, 0.99)}, {}, {}, r"betas was \[0.9, 0.95\] and is \[0.9, 0.99\]"),
        ({"steps": 8}, {}, {}, r"decay_steps was 4 and is 8 .*keep decay_steps=4"),
        ({"policy": FlashAttentionConfig.bfloat16()}, {}, {}, r"policy was None and is {.*mlp"),
        ({}, {}, {"data": "source"}, "data was 'topics' and is 'source'"),
        ({}, {"base": 5e5}, {}, r"model\.rope_base was 10000\.0 and is 500000\.0"),
        ({}, {"residual": torch.bfloat16}, {}, r"model\.residual was None and is 'torch.bfloat16'"),
        ({}, {"classes": 14}, {}, r"of another model.*head\.weight"),
    ],
)
def test_another_run_is_refused_with_the_difference(tmp_path, settings, model, run_config, message):
    first = TrainConfig(steps=4)
    quiet(shaped(), one, first, folder=tmp_path, run_config={"data": "topics"})
    other, changed = shaped(**model), {"data": "topics"} | run_config
    with pytest.raises(ResumeError, match=f"(?s){message}") as caught:
        quiet(other, one, replace(first, **settings), folder=tmp_path, run_config=changed)
    assert "weight_decay" not in str(caught.value)
    assert {p.dtype for p in other.parameters()} == {torch.float32}


def test_settings_that_change_no_weight_may_change(tmp_path):
    quiet(Tiny(), one, TrainConfig(steps=4, decay_steps=9), folder=tmp_path)
    other = TrainConfig(steps=6, decay_steps=9, checkpoint_every=1, keep=5)
    longer = quiet(Tiny(), one, other, folder=tmp_path)
    assert len(longer) == 6
    assert quiet(Tiny(), one, other, folder=tmp_path) == longer  # complete: left alone
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "partial-000007").mkdir()  # as a killed run leaves it
    quiet(Tiny(), one, other, folder=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob("partial-*"))


# --- the files ------------------------------------------------------------------------------------


def state(value):
    return {"weights": torch.full((300,), float(value))}


def test_the_last_ones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.run() is None
    for step in (1, 2, 3, 10):
        checkpoints.save(step, state(step), {"done": step})
    assert [step_of(path) for path in checkpoints.paths()] == [10, 3]
    assert checkpoints.run() == {"done": 10}
    read = state(0)
    checkpoints.load(read)
    assert read["weights"].eq(10).all()


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "run.json"])
def test_one_that_cannot_be_read_is_named_with_the_way_on(tmp_path, file):
    settings = TrainConfig(steps=3, checkpoint_every=1)
    quiet(Tiny(), one, settings, folder=tmp_path)
    newest = tmp_path / "step-000003" / file
    os.truncate(newest, newest.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"step-000003 cannot be read.*Delete it"):
        quiet(Tiny(), one, settings, folder=tmp_path)
    shutil.rmtree(newest.parent)
    assert len(quiet(Tiny(), one, settings, folder=tmp_path)) == 3


def test_a_folder_of_an_older_version_is_refused(tmp_path):
    (tmp_path / "step-000200.pt").touch()
    with pytest.raises(CheckpointError, match=r"older version of the lab \(step-\*\.pt\)"):
        quiet(Tiny(), one, TrainConfig(steps=1), folder=tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="limits files on POSIX systems")
def test_a_full_disk_leaves_the_older_ones_and_nothing_unfinished(tmp_path):
    import resource

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1), {"done": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(CheckpointError, match="step 2 cannot be saved"):
            checkpoints.save(2, {"weights": torch.zeros(2**20)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.glob("partial-*"))
    assert checkpoints.run() == {"done": 1}


def test_two_programs_cannot_train_in_one_folder_and_nothing_else_is_warned_of(tmp_path):
    with (
        Checkpoints(tmp_path).in_use(),
        pytest.raises(CheckpointError, match="another program is training"),
    ):
        quiet(Tiny(), one, TrainConfig(steps=1), folder=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            quiet(Tiny(), one, TrainConfig(steps=3, checkpoint_every=1), folder=tmp_path)
