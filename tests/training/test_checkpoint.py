"""Checkpoints: whole or not there, damage is seen, and a killed run continues exactly."""

import contextlib
import dataclasses
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.training.test_loop import Tiny, one, quiet

from labsupport.training import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    Decoder,
    DecoderConfig,
    ResumeError,
    Savings,
    TrainSettings,
    train,
)
from labsupport.training.checkpoint import step_of

STEPS = 12
posix = pytest.mark.skipif(os.name != "posix", reason="SIGKILL is of POSIX systems")

# Trains in a folder, and prints each step's loss exactly, once its checkpoint is asked for. The
# weights are many, so that writing them takes a good part of the time; dropout draws from PyTorch's
# random numbers, and the batches' noise from NumPy's and Python's. It waits after a step, if asked.
PROGRAM = f"""
import random, sys, time
import numpy as np, torch
from labsupport.training import TrainSettings, train
from tests.training.test_loop import Tiny, batch

class Heavy(Tiny):
    def __init__(self):
        super().__init__(seed=3, dropout=0.3)
        self.ballast = torch.nn.Parameter(torch.randn(1000, int(sys.argv[2])))

    def forward(self, tokens, labels):
        noise = np.random.random() + random.random()
        return super().forward(tokens, labels) + 1e-3 * noise * self.ballast.square().mean()

def on_step(row):
    print(row.step, row.loss.hex(), row.grad_norm.hex(), flush=True)
    if row.step == int(sys.argv[3]):
        time.sleep(600)

torch.set_num_threads(1)
train(
    Heavy(),
    lambda step: [batch(2 * step), batch(2 * step + 1)],
    TrainSettings({STEPS}, learning_rate=1e-2, warmup_steps=3, accumulation=2, checkpoint_every=2),
    folder=sys.argv[1],
    on_step=on_step,
    progress=False,
)
"""


def program(folder, ballast=100, wait_at=-1):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(ballast), str(wait_at)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(running):
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    return out.splitlines(), err


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Loss and gradient norm of each step of a run that nobody disturbed."""
    lines, _ = finish(program(tmp_path_factory.mktemp("unbroken")))
    assert len(lines) == STEPS
    return lines


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


def cut(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


# --- a killed run ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory, unbroken):
    """The folder of a run that was killed after 7 steps."""
    folder = tmp_path_factory.mktemp("killed")
    running = program(folder, wait_at=6)
    seen = [running.stdout.readline().strip() for _ in range(7)]
    kill(running)
    assert seen == unbroken[:7]
    assert running.returncode == -signal.SIGKILL
    return folder


@posix
@pytest.mark.parametrize("damage", [None, flip_a_byte, cut])
def test_a_killed_run_resumes_bit_for_bit_also_from_the_checkpoint_before_a_damaged_one(
    tmp_path, killed, unbroken, damage
):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    newest = Checkpoints(tmp_path).paths()[0]
    if damage:
        damage(newest)
    lines, err = finish(program(tmp_path))
    assert_resumed_exactly(lines, unbroken)
    if damage:
        assert len(lines) == STEPS - step_of(newest) + 2  # a checkpoint every 2 steps
        assert f"{newest.name} is damaged" in err.replace("\n", " ")
        assert newest.exists()
    else:
        assert err == ""


@posix
@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_checkpoint_resumes_bit_for_bit(tmp_path):
    ballast = 4000  # 16 MB of weights, 48 MB of checkpoint
    first = program(tmp_path / "a", ballast)
    expected, _ = finish(first)
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


@posix
@pytest.mark.slow
def test_a_run_killed_at_any_moments_resumes_bit_for_bit(tmp_path, unbroken):
    started = time.monotonic()
    finish(program(tmp_path / "timed"))
    whole = time.monotonic() - started
    moments = random.Random(time.time_ns())
    folder, seen = tmp_path / "killed", []
    for _ in range(8):
        running = program(folder)
        time.sleep(whole * moments.uniform(0.5, 1.0))
        seen += kill(running)
    lines, _ = finish(program(folder))
    # Every step that was ever taken, and there may be several of a number, is the unbroken run's.
    assert set(seen + lines) == set(unbroken)


# --- in one program -------------------------------------------------------------------------------


def test_a_resumed_run_has_the_whole_history_and_a_complete_one_is_left_alone(tmp_path):
    settings = TrainSettings(steps=8, decay_steps=8, checkpoint_every=3)
    whole = quiet(Tiny(dropout=0.2), one, settings)
    model = Tiny(dropout=0.2)
    first = dataclasses.replace(settings, steps=5)
    quiet(model, one, first, folder=tmp_path)
    torch.rand(100), np.random.random(), random.random()  # the run brings its own numbers back
    resumed = quiet(Tiny(seed=9, dropout=0.2), one, settings, folder=tmp_path)
    assert resumed.losses == whole.losses
    assert [row.step for row in resumed] == list(range(8))
    steps = []
    again = quiet(Tiny(), one, settings, folder=tmp_path, on_step=steps.append)
    assert again == resumed
    assert steps == []


def test_float16_resumes_with_its_loss_scale(tmp_path):
    class Loud(Tiny):
        def forward(self, tokens, labels):
            return super().forward(tokens, labels) * 30.0

    settings = TrainSettings(steps=10, decay_steps=10, autocast=torch.float16)
    whole = quiet(Loud(), one, settings)
    quiet(Loud(), one, dataclasses.replace(settings, steps=2), folder=tmp_path)
    resumed = quiet(Loud(), one, settings, folder=tmp_path)
    assert resumed.losses == whole.losses
    assert [row.skipped for row in resumed] == [row.skipped for row in whole]
    assert any(row.skipped for row in whole)


def test_other_settings_are_refused_with_the_list_of_differences(tmp_path):
    settings = TrainSettings(steps=4)
    quiet(Tiny(), one, settings, folder=tmp_path, course={"data": "topics"})
    other = dataclasses.replace(settings, learning_rate=1e-3, betas=(0.9, 0.99))
    with pytest.raises(ResumeError) as caught:
        quiet(Tiny(), one, other, folder=tmp_path, course={"data": "source"})
    told = str(caught.value)
    assert "learning_rate was 0.0006 and is 0.001" in told
    assert "betas was (0.9, 0.95) and is (0.9, 0.99)" in told
    assert "data was 'topics' and is 'source'" in told
    assert "weight_decay" not in told
    assert "fresh" in told


def test_more_steps_change_the_schedule_and_are_refused_unless_it_is_kept(tmp_path):
    quiet(Tiny(), one, TrainSettings(steps=4), folder=tmp_path)
    with pytest.raises(ResumeError, match=r"decay_steps was 4 and is 8 .*keep decay_steps=4"):
        quiet(Tiny(), one, TrainSettings(steps=8), folder=tmp_path)
    history = quiet(Tiny(), one, TrainSettings(steps=8, decay_steps=4), folder=tmp_path)
    assert len(history) == 8


def test_settings_that_change_no_weight_may_change(tmp_path):
    quiet(Tiny(), one, TrainSettings(steps=4, decay_steps=9), folder=tmp_path)
    other = TrainSettings(steps=6, decay_steps=9, checkpoint_every=1, keep=5)
    assert len(quiet(Tiny(), one, other, folder=tmp_path)) == 6


def test_another_model_is_refused(tmp_path):
    quiet(Tiny(), one, TrainSettings(steps=2), folder=tmp_path)
    wider = Tiny()
    wider.head = torch.nn.Linear(16, 14)
    with pytest.raises(ResumeError, match=r"another model.*head\.weight"):
        quiet(wider, one, TrainSettings(steps=2), folder=tmp_path)


def test_the_shape_of_a_model_belongs_to_the_course(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Config:
        rope_base: float

    def shaped(base):
        model = Tiny()
        model.config = Config(base)
        return model

    quiet(shaped(1e4), one, TrainSettings(steps=2), folder=tmp_path)
    with pytest.raises(ResumeError, match=r"model\.rope_base was 10000\.0 and is 500000\.0"):
        quiet(shaped(5e5), one, TrainSettings(steps=2), folder=tmp_path)


def test_a_stream_that_is_rounded_otherwise_belongs_to_the_course(tmp_path):
    def decoder(residual):
        torch.manual_seed(0)
        shape = DecoderConfig(vocab_size=14, width=16, layers=1, heads=2)
        return Decoder(shape, Savings(residual=residual))

    quiet(decoder(None), one, TrainSettings(steps=1), folder=tmp_path)
    with pytest.raises(ResumeError, match=r"model\.residual was None and is 'torch\.bfloat16'"):
        quiet(decoder(torch.bfloat16), one, TrainSettings(steps=2, decay_steps=1), folder=tmp_path)


def test_fresh_begins_anew(tmp_path):
    settings = TrainSettings(steps=3)
    first = quiet(Tiny(), one, settings, folder=tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    steps = []
    other = dataclasses.replace(settings, learning_rate=1e-3)
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

    settings = TrainSettings(steps=5, checkpoint_every=1)
    with pytest.raises(RuntimeError, match="no more data"):
        quiet(Tiny(), batches, settings, folder=tmp_path)
    assert quiet(Tiny(), one, settings, folder=tmp_path).losses == quiet(
        Tiny(), one, settings
    ).losses  # fmt: skip


# --- the files ------------------------------------------------------------------------------------


def state(step):
    return {"step": step, "weights": torch.full((300,), float(step))}


def test_the_last_ones_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        path = checkpoints.save(step, state(step))
        assert path.exists()
    assert [path.name.split(".")[0] for path in checkpoints.paths()] == [
        "step-000010",
        "step-000003",
    ]
    assert checkpoints.load_newest()["step"] == 10


def test_the_name_is_the_hash_and_the_content_needs_no_code(tmp_path):
    path = Checkpoints(tmp_path).save(1, state(1))
    assert path.name.split(".")[1] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(torch.load(path, weights_only=True)["weights"], torch.ones(300))


@pytest.mark.parametrize("at", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_a_flipped_byte_anywhere_is_seen(tmp_path, at):
    Checkpoints(tmp_path).save(1, state(1))
    newest = Checkpoints(tmp_path).save(2, state(2))
    flip_a_byte(newest, at)
    with pytest.warns(CheckpointWarning, match=newest.name):
        assert Checkpoints(tmp_path).load_newest()["step"] == 1
    assert newest.exists()


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_file_that_was_cut_off_is_seen(tmp_path, size):
    Checkpoints(tmp_path).save(1, state(1))
    newest = Checkpoints(tmp_path).save(2, state(2))
    os.truncate(newest, size if size >= 0 else newest.stat().st_size + size)
    with pytest.warns(CheckpointWarning, match=newest.name):
        assert Checkpoints(tmp_path).load_newest()["step"] == 1


def test_damaged_ones_do_not_count_and_are_never_deleted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    good = checkpoints.save(1, state(1))
    shutil.copy(good, tmp_path / "copy")
    bad = checkpoints.save(2, state(2))
    shutil.copy(tmp_path / "copy", good)
    flip_a_byte(bad)
    later = Checkpoints(tmp_path, keep=1)
    with pytest.warns(CheckpointWarning):
        assert later.load_newest()["step"] == 1
    newest = later.save(3, state(3))
    assert set(later.paths()) == {newest, bad}


def test_the_only_whole_one_is_not_deleted_for_one_that_did_not_reach_the_disk(tmp_path):
    good = Checkpoints(tmp_path, keep=1).save(1, state(1))
    bad = good.with_name(good.name.replace("000001", "000002"))
    bad.write_bytes(good.read_bytes()[:-1])
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints._prune()
    assert set(checkpoints.paths()) == {good, bad}


def test_without_a_whole_one_it_says_so(tmp_path):
    path = Checkpoints(tmp_path).save(1, state(1))
    cut(path)
    with pytest.raises(CheckpointError, match=r"is damaged.*no other checkpoint"):
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
        with pytest.raises(OSError, match="File too large"):
            checkpoints.save(2, {"weights": torch.zeros(2**20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.glob(".step-*"))
    assert checkpoints.load_newest()["step"] == 1


def test_two_programs_cannot_train_in_one_folder(tmp_path):
    with (
        Checkpoints(tmp_path).in_use(),
        pytest.raises(CheckpointError, match="another program is training"),
    ):
        quiet(Tiny(), one, TrainSettings(steps=1), folder=tmp_path)
    quiet(Tiny(), one, TrainSettings(steps=1), folder=tmp_path)


def test_nothing_is_warned_of_when_nothing_is_damaged(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Tiny(), one, TrainSettings(steps=3, checkpoint_every=1), folder=tmp_path)
        train(Tiny(), one, TrainSettings(steps=3, checkpoint_every=1), folder=tmp_path)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that cannot be read")
def test_a_checkpoint_that_cannot_be_read_is_a_damaged_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": 1})
    (tmp_path / f"step-000002.{'0' * 64}.pt").symlink_to("/proc/self/mem")
    with pytest.warns(CheckpointWarning, match="cannot be read"):
        assert checkpoints.load_newest() == {"x": 1}
    checkpoints.save(3, {"x": 3})
    assert checkpoints.load_newest() == {"x": 3}
