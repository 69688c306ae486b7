"""The loop's arithmetic: what a step computes, when it stops, what it writes down."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labsupport.precision import FlashAttentionConfig
from labsupport.training import History, TrainConfig, TrainingDivergedError, train
from labsupport.training.train import learning_rate, write_text

VOCABULARY, WIDTH = 13, 16
BF16, F16 = torch.bfloat16, torch.float16
POLICIES = {BF16: FlashAttentionConfig.bfloat16(), F16: FlashAttentionConfig.float16()}


class Tiny(nn.Module):
    """A next-token model without any attention, called as a Decoder is."""

    def __init__(self, seed=0, dropout=0.0, factor=1.0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.factor = factor

    def forward(self, tokens, labels=None, factor=1.0):
        logits = self.head(self.dropout(self.norm(self.embedding(tokens))))
        if labels is None:
            return logits
        logits = logits.flatten(0, 1).to(self.head.weight.dtype)
        return F.cross_entropy(logits, labels.flatten()) * self.factor * factor


class BadGradient(Tiny):
    """A finite loss whose gradient is not: sqrt at 0, where a batch says 0."""

    def forward(self, tokens, labels, factor):
        zero = (self.head.weight * (1 - factor)).sum() * 0
        return super().forward(tokens, labels) + (torch.sqrt(zero) if factor != 1 else 0)


def batch(seed, length=24, ignored=0, **more):
    generator = torch.Generator().manual_seed(1000 + seed)
    tokens = torch.randint(VOCABULARY, (1, length), generator=generator)
    labels = (tokens * 5 + 1) % VOCABULARY
    labels[:, :ignored] = -100
    return {"tokens": tokens, "labels": labels} | {k: torch.tensor(v) for k, v in more.items()}


def one(step):
    return [batch(step)]


def quiet(model, batches, settings, **options):
    return train(model, batches, settings, progress=False, **options)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(model, before):
    return all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# --- a step ---------------------------------------------------------------------------------------


def test_the_learning_rate_rises_in_a_line_and_falls_along_a_cosine():
    settings = TrainConfig(steps=100, learning_rate=2.0, warmup_steps=20, final_fraction=0.25)
    rates = [learning_rate(step, settings) for step in range(130)]
    assert rates[:20] == pytest.approx([0.1 * (step + 1) for step in range(20)])
    assert rates[20] == 2.0
    assert rates[60] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[40] == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[100:] == pytest.approx([0.5] * 30)


def test_a_run_is_adamw_with_the_rate_of_each_step_and_leaves_no_gradients():
    """The same training by hand; only matrices decay."""
    settings = TrainConfig(steps=6, learning_rate=1e-2, warmup_steps=2, weight_decay=0.5)
    by_hand, ours = Tiny(), Tiny()
    parameters = list(by_hand.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        optimizer.zero_grad()
        by_hand(**batch(step)).backward()
        nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimizer.step()
    history = quiet(ours, one, settings)
    assert [row.learning_rate for row in history] == [learning_rate(s, settings) for s in range(6)]
    torch.testing.assert_close(weights(ours), weights(by_hand), rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in ours.parameters())


def trained_with(model, batches, settings):
    """The row of the last step, and the gradients with which its update was made."""
    gradients = []

    def keep(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients[:] = [p.grad.clone() for p in parameters]

    hook = register_optimizer_step_pre_hook(keep)
    try:
        return quiet(model, batches, settings).rows[-1], gradients
    finally:
        hook.remove()


def test_accumulated_micro_batches_are_one_large_batch():
    pairs = [(40, 3), (8, 8), (16, 1)]  # tokens, ignored
    parts = [batch(i, length=n, ignored=skip) for i, (n, skip) in enumerate(pairs)]
    whole = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    settings = TrainConfig(steps=1, max_grad_norm=None)
    accumulating = replace(settings, gradient_accumulation_steps=3)
    a, left = trained_with(Tiny().double(), lambda step: parts, accumulating)
    b, right = trained_with(Tiny().double(), lambda step: [whole], settings)
    assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-12)
    assert (a.tokens, b.tokens) == (56, 64)  # a micro-batch without labels is not run at all
    assert len(left) == len(list(Tiny().parameters()))
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-14)


def test_the_norm_is_that_before_clipping_and_the_gradients_are_clipped():
    norm = quiet(Tiny(), one, TrainConfig(steps=1, max_grad_norm=None)).rows[0].grad_norm
    row, left = trained_with(Tiny(), one, TrainConfig(steps=1, max_grad_norm=norm / 10))
    assert row.grad_norm == pytest.approx(norm)
    assert float(nn.utils.get_total_norm(left)) == pytest.approx(norm / 10, rel=1e-4)


# --- 16 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"autocast": BF16}, {"policy": POLICIES[F16]}], ids=list)
def test_in_16_bits_it_learns_as_well(how):
    settings = TrainConfig(steps=40, learning_rate=4e-2)
    plain = quiet(Tiny(), one, replace(settings, steps=1))
    model = Tiny()
    mixed = quiet(model, one, replace(settings, **how))
    assert not any(row.skipped for row in mixed.rows[1:])  # one float16 overflow lowers the scale
    assert mixed.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)
    assert mixed.losses[0] != plain.losses[0]
    assert mixed.losses[-1] < 0.5 < 2 < mixed.losses[0]
    assert model.head.weight.dtype == (torch.float32 if "autocast" in how else F16)


# --- what stops a run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "factor", "how", "micro_batch", "said"),
    [
        (Tiny, math.inf, {}, 1, "step 3, micro-batch 1 of 2.*the loss is inf"),
        (BadGradient, 0.0, {}, None, "step 3, a micro-batch of 2.*norm is nan"),
        (BadGradient, 0.0, {"policy": POLICIES[BF16]}, None, "step 3, a micro-batch of 2.*norm"),
    ],
)
def test_what_is_not_finite_stops_before_the_update_and_is_named(
    kind, factor, how, micro_batch, said
):
    model, seen = kind(), []

    def batches(step):
        seen.append(weights(model))
        factors = (1.0, factor if step == 3 else 1.0)
        return [batch(2 * step + i, factor=factor) for i, factor in enumerate(factors)]

    with pytest.raises(TrainingDivergedError, match=said) as caught:
        quiet(model, batches, TrainConfig(steps=9, gradient_accumulation_steps=2, **how))
    assert (caught.value.step, caught.value.micro_batch) == (3, micro_batch)
    assert [row.step for row in caught.value.history] == [0, 1, 2]
    assert "PrecisionTracker" in str(caught.value)
    assert same(model, seen[3])
    assert not same(model, seen[2])


def test_float16_skips_such_a_step_and_stops_when_there_is_no_scale_left_to_lower():
    def bad(steps):
        return lambda step: [batch(step, factor=0.0 if step in steps else 1.0)]

    rows = quiet(BadGradient(), bad([2]), TrainConfig(steps=4, autocast=F16))
    assert [row.step for row in rows if row.skipped] == [2]
    with pytest.raises(TrainingDivergedError, match=r"micro-batch 0 of 1.*bfloat16") as caught:
        quiet(BadGradient(), bad(range(17)), TrainConfig(steps=17, autocast=F16))
    assert caught.value.step == 16  # 65,536 = 2^16, halved 16 times


@pytest.mark.parametrize(
    ("model", "batches", "error", "said"),
    [
        (Tiny(), [batch(0), batch(1)], ValueError, "gradient_accumulation_steps=1"),
        (Tiny(), [batch(0, ignored=24)], ValueError, r"batches\(0\) has no label"),
        (Tiny(), [{"tokens": torch.zeros(3)}], TypeError, "a micro-batch is .*`tokens` and `lab"),
        (Tiny(), [batch(0) | {"cu_seqlens": [0, 4, 8]}], TypeError, "a micro-batch is"),
        (Tiny().bfloat16(), [batch(0)], ValueError, r"embedding\.weight is torch\.bfloat16.*autoc"),
        (Tiny().requires_grad_(False), [batch(0)], ValueError, "requires gradients"),
    ],
)
def test_what_cannot_be_trained_is_refused(model, batches, error, said):
    with pytest.raises(error, match=said):
        quiet(model, lambda step: batches, TrainConfig(steps=1))


def test_settings_out_of_range_are_refused_by_name():
    for wrong in (
        {"gradient_accumulation_steps": 0},
        {"learning_rate": math.nan},
        {"warmup_steps": 11},
        {"warmup_steps": -1},
        {"autocast": torch.float32},
        {"autocast": BF16, "policy": POLICIES[BF16]},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TrainConfig(**{"steps": 10, **wrong})


# --- what is written down -------------------------------------------------------------------------


def test_the_history_is_a_table_and_a_chart_with_a_row_for_each_step():
    history = quiet(Tiny(), one, TrainConfig(steps=4))
    frame = history.frame()
    assert {"step", "loss", "tokens_per_s"} < set(frame.columns) == set(History().frame().columns)
    assert (list(frame["step"]), list(frame["loss"])) == ([0, 1, 2, 3], history.losses)
    assert frame["tokens_per_s"].to_numpy() == pytest.approx((24 / frame["seconds"]).to_numpy())
    assert history.tokens_per_s == frame["tokens_per_s"].median()
    assert history.peak_bytes == max(frame["peak_bytes"]) > 10 * 2**20
    assert History.from_state(history.state()) == history
    assert list(history.chart("It learns").axes[0].get_lines()[0].get_ydata()) == history.losses
    with pytest.raises(ValueError, match="no step"):
        History().chart()


def test_the_validation_loss_is_the_mean_over_all_labels_of_the_model_after_the_step():
    held_out = [batch(90, 40, ignored=3), batch(91, 8), batch(92, 16, ignored=16)]
    settings = TrainConfig(steps=5, checkpoint_every=2)
    model, modes = Tiny(dropout=0.5), []

    def sample(trained):
        modes.append((trained.training, torch.is_grad_enabled()))
        return "text"

    rows = quiet(model, one, settings, validation=held_out, sample=sample).rows
    assert [row.validation_loss is None for row in rows] == [True, False, True, False, False]
    assert [row.sample for row in rows] == [None, "text", None, "text", "text"]
    assert modes == [(False, False)] * 3
    assert model.training
    model.eval()
    whole = {name: torch.cat([part[name] for part in held_out], dim=1) for name in held_out[0]}
    assert rows[-1].validation_loss == pytest.approx(model(**whole).item(), rel=1e-6)
    # Evaluation changes no step, although dropout draws random numbers in training.
    alone = quiet(Tiny(dropout=0.5), one, settings)
    assert [row.loss for row in rows] == alone.losses


def test_a_model_writes_what_it_has_learned_the_same_each_time():
    model = Tiny()
    quiet(model, one, TrainConfig(steps=40, learning_rate=4e-2))
    state = torch.get_rng_state()
    first, again = (
        write_text(model.eval(), torch.tensor([[3]]), 8, context=4)[0].tolist() for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert first == again
    assert len(first) == 9
    assert sum(b == (a * 5 + 1) % VOCABULARY for a, b in pairwise(first)) >= 6
