"""Training under a precision policy: 16-bit weights, float32 masters, the same course."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest
import torch

from labsupport.precision import FlashAttentionConfig
from labsupport.training.loop import (
    Checkpoints,
    ResumeError,
    TrainingDivergedError,
    TrainSettings,
)
from labsupport.training.model import Decoder, DecoderConfig, Savings
from tests.training.test_loop import BadGradient, Tiny, batch, one, quiet, train_by_hand

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
POLICIES = {
    "bfloat16": FlashAttentionConfig.bfloat16(),
    "float16": FlashAttentionConfig.float16(),
}
in_16_bits = pytest.mark.parametrize("name", POLICIES)
GPT2 = DecoderConfig(vocab_size=13, width=32, layers=2, heads=4)
LLAMA = dataclasses.replace(
    GPT2, kv_heads=2, mlp_width=48, norm="rms", mlp="swiglu", bias=False, tied=False
)
SAVINGS = {
    "none": Savings(),
    "checkpoint": Savings(checkpoint=True),
    "mlp_chunk": Savings(mlp_chunk=7),
    "loss_chunk": Savings(loss_chunk=7),
    "residual": Savings(residual=F32),
    "all": Savings("standard", True, 7, 7, BF16),
}


def decoder(config=GPT2, savings=None, seed=0):
    torch.manual_seed(seed)
    return Decoder(config, savings)


def learned(seed=0, **settings):
    """What a small decoder learns: the loss of each step, and the model."""
    model = decoder(seed=seed)
    chosen = TrainSettings(steps=60, learning_rate=1e-2, warmup_steps=5, accumulation=2, **settings)
    history = quiet(model, lambda step: [batch(2 * step, 64), batch(2 * step + 1, 64)], chosen)
    return history, model


@pytest.fixture(scope="module")
def float32():
    return learned()[0].losses


def distance(losses, others):
    return sum(abs(a - b) for a, b in zip(losses, others, strict=True)) / len(losses)


@in_16_bits
def test_it_follows_float32_well_within_the_distance_of_a_second_seed(name, float32):
    noise = distance(learned(seed=1)[0].losses, float32)
    history, model = learned(policy=POLICIES[name])
    assert not any(row.skipped for row in history)
    assert history.losses[-1] < 0.3 < 2.3 < history.losses[0]
    assert 0 < distance(history.losses, float32) < noise / 2
    assert model.get_parameter("blocks.0.mlp.up.weight").dtype == POLICIES[name].mlp
    assert model.head.weight is model.embedding.weight


def test_a_float32_policy_is_no_policy_bit_for_bit(float32):
    assert learned(policy=FlashAttentionConfig.float32())[0].losses == float32


@in_16_bits
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("saving", SAVINGS)
def test_each_way_to_save_memory_works_under_each_policy(name, config, saving):
    settings = TrainSettings(steps=3, learning_rate=1e-2)
    exact = quiet(decoder(config), one, settings)
    model = decoder(config, SAVINGS[saving])
    under = quiet(model, one, dataclasses.replace(settings, policy=POLICIES[name]))
    assert under.losses == pytest.approx(exact.losses, rel=1e-2)
    for got, expected in zip(under, exact, strict=True):
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)


# --- masters --------------------------------------------------------------------------------------


def saved_optimizer(folder):
    state = Checkpoints(folder).load_newest()
    assert state is not None
    return state["optimizer"]


class OneWeight(Tiny):
    """Its gradient is 1, so that AdamW moves it by the learning rate, step after step."""

    def forward(self, tokens, labels):
        return super().forward(tokens, labels) * 0 + self.head.weight[0, 0].float()


def test_updates_below_half_an_ulp_add_up_in_the_masters(tmp_path):
    # 1 - 2^-8 is the next bfloat16 number below 1. A step of 2^-14 alone rounds back to 1.
    model = OneWeight()
    with torch.no_grad():
        model.head.weight.fill_(1.0)
    settings = TrainSettings(
        steps=64,
        learning_rate=2**-14,
        final_fraction=1,
        weight_decay=0,
        policy=POLICIES["bfloat16"],
    )
    seen = []

    def record(row):
        seen.append(model.head.weight[0, 0].item())

    quiet(model, one, settings, folder=tmp_path, on_step=record)
    assert seen[:30] == [1.0] * 30
    assert seen[-1] == 1 - 2**-8
    master = saved_optimizer(tmp_path)["masters"]["head.weight"]
    assert master.dtype == F32
    assert master[0, 0].item() == pytest.approx(1 - 64 * 2**-14, abs=1e-6)


def test_a_parameter_takes_2_bytes_and_beside_it_12_for_master_and_adamw(tmp_path):
    model = decoder(LLAMA)
    quiet(model, one, TrainSettings(steps=1, policy=POLICIES["bfloat16"]), folder=tmp_path)
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2}
    assert {model.get_parameter(name).dtype for name in matrices} == {BF16}
    saved = saved_optimizer(tmp_path)
    assert matrices <= saved["masters"].keys()
    assert {saved["masters"][name].dtype for name in matrices} == {F32}
    states = saved["optimizer"]["state"].values()
    moments = [state[of] for state in states for of in ("exp_avg", "exp_avg_sq")]
    assert {moment.dtype for moment in moments} == {F32}
    assert sum(moment.numel() for moment in moments) == 2 * LLAMA.parameters


def test_only_matrices_decay_and_the_rate_follows_the_schedule():
    class Still(Tiny):
        def forward(self, tokens, labels):
            return super().forward(tokens, labels) * 0.0

    settings = TrainSettings(steps=4, learning_rate=0.1, warmup_steps=2, weight_decay=0.5)
    by_hand, under = Still(), Still()
    with torch.no_grad():  # masters begin as the rounded weights
        for parameter in by_hand.parameters():
            parameter.copy_(parameter.bfloat16())
    train_by_hand(by_hand, one, settings)
    quiet(under, one, dataclasses.replace(settings, policy=POLICIES["bfloat16"]))
    for p, q in zip(under.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(p, q.bfloat16())


@pytest.mark.parametrize("lengths", [(24, 24, 24), (40, 8, 16)])
def test_accumulated_micro_batches_are_one_large_batch_to_16_bit_rounding(lengths):
    class Exact(Tiny):
        def forward(self, tokens, labels):
            logits = self.head(self.norm(self.embedding(tokens))).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits.float(), labels.flatten())

    parts = [batch(i, length=n, ignored=i) for i, n in enumerate(lengths)]
    whole = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    settings = TrainSettings(steps=1, policy=POLICIES["bfloat16"])
    accumulating = dataclasses.replace(settings, accumulation=3)
    a = quiet(Exact(), lambda step: parts, accumulating).rows[0]
    b = quiet(Exact(), lambda step: [whole], settings).rows[0]
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-2)


# --- what stops a run, and what does not ----------------------------------------------------------


def test_a_gradient_that_is_not_finite_stops_before_the_update_under_bfloat16():
    model, before = BadGradient(), []

    def batches(step):
        before.append([p.detach().clone() for p in model.parameters()])
        return [batch(step) | {"factor": torch.tensor(0.0 if step == 2 else 1.0)}]

    with pytest.raises(TrainingDivergedError, match=r"step 2, micro-batch 0 of 1.*head\.weight"):
        quiet(model, batches, TrainSettings(steps=4, policy=POLICIES["bfloat16"]))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before[2], strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(before[1], before[2], strict=True))


class Loud(Tiny):
    """Its float16 gradients overflow under the scale that a run begins with."""

    def forward(self, tokens, labels):
        return super().forward(tokens, labels) * 30.0


def test_float16_steps_that_overflow_are_skipped_until_the_scale_is_low_enough():
    settings = TrainSettings(steps=12, policy=POLICIES["float16"])
    model, kept = Loud(), []
    before = model.head.weight.detach().half()
    history = quiet(
        model, one, settings, on_step=lambda _: kept.append(torch.equal(model.head.weight, before))
    )
    first = [row.skipped for row in history].index(False)
    assert first > 0
    assert kept == [True] * first + [False] * (12 - first)


def test_autocast_and_policy_exclude_each_other():
    with pytest.raises(ValueError, match=r"autocast is torch\.bfloat16, and there is a policy"):
        TrainSettings(steps=1, autocast=BF16, policy=POLICIES["bfloat16"])


# --- a resumed run --------------------------------------------------------------------------------

PROGRAM = """
import dataclasses, sys, time, torch
from tests.training.test_loop import batch
from tests.training.test_policy import POLICIES, decoder
from labsupport.training.loop import TrainSettings, train

def on_step(row):
    print(row.step, row.loss.hex(), row.grad_norm.hex(), flush=True)
    if row.step == int(sys.argv[2]):
        time.sleep(600)

torch.set_num_threads(1)
model = decoder()
train(
    model,
    lambda step: [batch(2 * step), batch(2 * step + 1)],
    TrainSettings(10, learning_rate=1e-2, accumulation=2, checkpoint_every=2,
                  policy=POLICIES["bfloat16"]),
    folder=sys.argv[1], on_step=on_step, progress=False,
)
print(sum(p.double().sum().item() for p in model.parameters()).hex())
"""


def program(folder, wait_at=-1):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(wait_at)],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is of POSIX systems")
def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    whole = program(tmp_path / "whole")
    unbroken = whole.communicate(timeout=120)[0].splitlines()
    assert len(unbroken) == 11
    running = program(tmp_path / "killed", wait_at=6)
    assert running.stdout is not None
    seen = [running.stdout.readline().strip() for _ in range(7)]
    running.send_signal(signal.SIGKILL)
    running.communicate(timeout=60)
    assert seen == unbroken[:7]
    resumed = program(tmp_path / "killed").communicate(timeout=120)[0].splitlines()
    assert resumed == unbroken[6:]


def test_float16_resumes_with_its_masters_and_its_loss_scale(tmp_path):
    settings = TrainSettings(steps=10, decay_steps=10, policy=POLICIES["float16"])
    unbroken, model = Loud(), Loud()
    whole = quiet(unbroken, one, settings)
    quiet(Loud(), one, dataclasses.replace(settings, steps=2), folder=tmp_path)
    resumed = quiet(model, one, settings, folder=tmp_path)
    assert resumed.losses == whole.losses
    assert [row.skipped for row in resumed] == [row.skipped for row in whole]
    assert any(row.skipped for row in whole)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), unbroken.parameters(), strict=True)
    )


def test_another_policy_is_refused_and_leaves_the_model_alone(tmp_path):
    settings = TrainSettings(steps=2, policy=POLICIES["bfloat16"])
    quiet(Tiny(), one, settings, folder=tmp_path)
    model = Tiny()
    other = dataclasses.replace(settings, policy=FlashAttentionConfig(residual=F32))
    with pytest.raises(ResumeError, match=r"policy was .*'residual': 'bfloat16'.* and is .*"):
        quiet(model, one, other, folder=tmp_path)
    assert {p.dtype for p in model.parameters()} == {F32}
    with pytest.raises(ResumeError, match=r"policy was {.*} and is None"):
        quiet(model, one, TrainSettings(steps=2), folder=tmp_path)


def test_a_complete_run_is_loaded_into_a_model_that_is_under_the_policy_already(tmp_path):
    settings = TrainSettings(steps=3, policy=POLICIES["bfloat16"])
    model = decoder()
    history = quiet(model, one, settings, folder=tmp_path)
    trained = [p.detach().clone() for p in model.parameters()]
    assert quiet(model, one, settings, folder=tmp_path) == history
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trained, strict=True))
