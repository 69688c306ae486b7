"""Checkpoints: whole or not there, damage is seen, and a killed run continues exactly."""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from labsupport.precision import FlashAttentionConfig
from labsupport.training import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    Decoder,
    DecoderConfig,
    MemoryOptions,
    ResumeError,
    TrainConfig,
    train,
)
from labsupport.training.checkpoint import step_of
from tests.training.test_train import Tiny, batch, one, quiet

STEPS = 12
posix = pytest.mark.skipif(os.name != "posix", reason="SIGKILL is of POSIX systems")

# Trains in a folder, and prints each step's loss exactly, once its checkpoint is asked for. The
# weights are many, so that writing them takes a good part of the time; dropout draws from PyTorch's
# random numbers, and the batches' noise from NumPy's and Python's. It waits after a step, if asked.
PROGRAM = f"""
import random, sys, time
import numpy as np, torch
from labsupport.precision import FlashAttentionConfig
from labsupport.training import TrainConfig, train
from tests.training.test_train import Tiny, batch

class Heavy(Tiny):
    def __init__(self):
        super().__init__(seed=3, dropout=0.3)
        self.ballast = torch.nn.Parameter(torch.randn(1000, int(sys.argv[2])))

    def forward(self, tokens, labels):
        noise = np.random.random() + random.random()
        return super().forward(tokens, labels) + 1e-3 * noise * self.ballast.square().mean()

def on_step(row):
    print(row.step, row.loss.hex(), row.grad_norm.hex(), row.validation_loss, flush=True)
    if row.step == int(sys.argv[3]):
        time.sleep(600)

torch.set_num_threads(1)
settings = TrainConfig({STEPS}, learning_rate=1e-2, warmup_steps=3, gradient_accumulation_steps=2,
    checkpoint_every=2, policy=FlashAttentionConfig.bfloat16() if sys.argv[4] == "policy" else None)
train(
    Heavy(),
    lambda step: [batch(2 * step), batch(2 * step + 1)],
    settings,
    validation=[batch(99)],
    folder=sys.argv[1],
    on_step=on_step,
    progress=False,
)
"""


def program(folder, ballast=100, wait_at=-1, policy=""):
    arguments = [str(folder), str(ballast), str(wait_at), policy]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(running):
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    return out.splitlines(), err


def kill(running):
    running.send_signal(signal.SIGKILL)
    return running.communicate(timeout=60)[0].splitlines()


def assert_resumed_exactly(lines, unbroken):
    assert lines == unbroken[STEPS - len(lines) :]
    assert len(lines) < STEPS, "it began anew"


def flip_a_byte(path, at=0.5):
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(bytes(data))


# --- a killed run ---------------------------------------------------------------------------------


@posix
def test_a_killed_run_resumes_bit_for_bit_also_from_the_checkpoint_before_a_damaged_one(tmp_path):
    whole, damaged = program(tmp_path / "whole"), tmp_path / "damaged"
    unbroken, _ = finish(whole)
    assert len(unbroken) == STEPS
    running = program(tmp_path / "killed", wait_at=6)
    assert [running.stdout.readline().strip() for _ in range(7)] == unbroken[:7]
    kill(running)
    shutil.copytree(tmp_path / "killed", damaged)
    newest = Checkpoints(damaged).paths()[0]
    flip_a_byte(newest)
    both = [program(tmp_path / "killed"), program(damaged)]
    lines, err = finish(both[0])
    assert_resumed_exactly(lines, unbroken)
    assert err == ""
    lines, err = finish(both[1])
    assert_resumed_exactly(lines, unbroken)
    assert len(lines) == STEPS - step_of(newest) + 2  # a checkpoint every 2 steps
    assert f"{newest.name} in" in err


@posix
@pytest.mark.slow
def test_a_killed_run_under_a_policy_resumes_bit_for_bit(tmp_path):
    unbroken, _ = finish(program(tmp_path / "whole", policy="policy"))
    running = program(tmp_path / "killed", wait_at=6, policy="policy")
    assert [running.stdout.readline().strip() for _ in range(7)] == unbroken[:7]
    kill(running)
    assert_resumed_exactly(finish(program(tmp_path / "killed", policy="policy"))[0], unbroken)


@posix
@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_checkpoint_resumes_bit_for_bit(tmp_path):
    ballast = 4000  # 16 MB of weights, 48 MB of checkpoint
    expected, _ = finish(program(tmp_path / "a", ballast))
    folder = tmp_path / "b"
    for _ in range(10):
        if folder.exists():
            shutil.rmtree(folder)
        running = program(folder, ballast)
        kill_while_writing(running, folder)
        if left := list(folder.glob(".step-*.partial")):
            break
    assert left, "it was never killed while writing"
    assert Checkpoints(folder).paths()
    lines, err = finish(program(folder, ballast))
    assert err == ""
    assert_resumed_exactly(lines, expected)
    assert not list(folder.glob(".step-*.partial"))


def kill_while_writing(running, folder):
    """Kill a program when part of a second or later checkpoint is in its folder."""
    while running.poll() is None:
        with contextlib.suppress(OSError):
            writing = [p for p in folder.glob(".step-*.partial") if p.stat().st_size > 2**20]
            if writing and "000002" not in writing[0].name:
                break
        time.sleep(0.001)
    kill(running)


# --- in one program -------------------------------------------------------------------------------


def test_a_resumed_run_has_the_whole_history_and_a_complete_one_is_left_alone(tmp_path):
    settings = TrainConfig(steps=8, decay_steps=8, checkpoint_every=3)
    evaluated = {"validation": [batch(99)], "sample": lambda model: "text"}
    whole = quiet(Tiny(dropout=0.2), one, settings, **evaluated)
    quiet(Tiny(dropout=0.2), one, replace(settings, steps=6), folder=tmp_path, **evaluated)
    torch.rand(100), np.random.random(), random.random()  # the run brings its own numbers back
    resumed = quiet(Tiny(seed=9, dropout=0.2), one, settings, folder=tmp_path, **evaluated)
    for name in ("step", "loss", "grad_norm", "validation_loss", "sample"):
        assert [getattr(r, name) for r in resumed] == [getattr(r, name) for r in whole]
    steps = []
    again = quiet(Tiny(), one, settings, folder=tmp_path, on_step=steps.append)
    assert again == resumed
    assert steps == []


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
        ({"learning_rate": 1e-3}, {}, {}, "learning_rate was 0.0006 and is 0.001"),
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
    assert len(quiet(Tiny(), one, other, folder=tmp_path)) == 6


def test_a_course_that_a_checkpoint_could_not_hold_is_refused_before_the_run(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        train(Tiny(), one, TrainConfig(1), folder=tmp_path, run_config={"data": Path("x")})
    assert list(tmp_path.iterdir()) == []


def test_fresh_begins_anew(tmp_path):
    settings = TrainConfig(steps=3)
    first = quiet(Tiny(), one, settings, folder=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    steps = []
    other = replace(settings, learning_rate=1e-3)
    quiet(Tiny(), one, other, folder=tmp_path, fresh=True, on_step=steps.append)
    assert [row.step for row in steps] == [0, 1, 2]
    assert steps[0].loss == first.losses[0]
    assert len(Checkpoints(tmp_path).paths()) == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failed_step_leaves_the_last_checkpoint_good(tmp_path):
    def batches(step):
        if step == 3:
            raise RuntimeError("no more data")
        return one(step)

    settings = TrainConfig(steps=5, checkpoint_every=1)
    with pytest.raises(RuntimeError, match="no more data"):
        quiet(Tiny(), batches, settings, folder=tmp_path)
    resumed = quiet(Tiny(), one, settings, folder=tmp_path)
    assert resumed.losses == quiet(Tiny(), one, settings).losses


# --- the files ------------------------------------------------------------------------------------


def state(step):
    return {"step": step, "weights": torch.full((300,), float(step))}


def test_the_last_ones_are_kept_under_their_hash_and_need_no_code(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        path = checkpoints.save(step, state(step))
        assert path.name.split(".")[1] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [step_of(path) for path in checkpoints.paths()] == [10, 3]
    assert checkpoints.load_newest()["step"] == 10
    assert torch.load(path, weights_only=True)["weights"].eq(10).all()


@pytest.mark.parametrize("damage", [0.0, 0.3, 0.7, 0.999, "empty", "cut"])
def test_a_flipped_byte_anywhere_and_a_file_that_was_cut_off_are_seen(tmp_path, damage):
    Checkpoints(tmp_path).save(1, state(1))
    newest = Checkpoints(tmp_path).save(2, state(2))
    if isinstance(damage, float):
        flip_a_byte(newest, damage)
    else:
        os.truncate(newest, 0 if damage == "empty" else newest.stat().st_size - 1)
    with pytest.warns(CheckpointWarning, match=newest.name):
        assert Checkpoints(tmp_path).load_newest()["step"] == 1
    assert newest.exists()


def test_a_damaged_one_of_a_later_step_does_not_count_and_is_not_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(1))
    bad = Checkpoints(tmp_path, keep=2).save(3, state(3))
    flip_a_byte(bad)
    with pytest.warns(CheckpointWarning):
        assert checkpoints.load_newest()["step"] == 1
    newest = checkpoints.save(2, state(2))
    assert set(checkpoints.paths()) == {newest, bad}


def test_without_a_whole_one_it_says_so(tmp_path):
    flip_a_byte(Checkpoints(tmp_path).save(1, state(1)))
    with pytest.raises(CheckpointError, match=r"damaged.*no other checkpoint"):
        Checkpoints(tmp_path).load_newest()
    assert Checkpoints(tmp_path / "nothing").load_newest() is None


@posix
def test_a_full_disk_leaves_the_older_ones_and_nothing_unfinished(tmp_path):
    import resource

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises((OSError, RuntimeError)):
            checkpoints.save(2, {"weights": torch.zeros(2**20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.glob(".step-*"))
    assert checkpoints.load_newest()["step"] == 1


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


def test_the_shape_of_a_decoder_belongs_to_the_run(tmp_path):
    quiet(Decoder(DecoderConfig(14, 16, 1, 2)), one, TrainConfig(1), folder=tmp_path)
    with pytest.raises(ResumeError, match=r"model\.rope_base was 10000\.0 and is 5\.0"):
        other = Decoder(DecoderConfig(14, 16, 1, 2, rope_base=5.0))
        quiet(other, one, TrainConfig(1), folder=tmp_path)
