"""The loop's arithmetic: what a step computes, when it stops, what it writes down."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labsupport.training import (
    History,
    TrainingDivergedError,
    TrainSettings,
    learning_rate,
    train,
)

VOCABULARY, WIDTH = 13, 16


class Tiny(nn.Module):
    """A next-token model without any attention, called as a Decoder is."""

    def __init__(self, seed=0, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, labels):
        logits = self.head(self.dropout(self.norm(self.embedding(tokens))))
        logits = logits.flatten(0, 1).to(self.head.weight.dtype)
        return F.cross_entropy(logits, labels.flatten())


def batch(seed, length=24, ignored=0):
    tokens = torch.randint(
        VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1000 + seed)
    )
    labels = (tokens * 5 + 1) % VOCABULARY
    labels[:, :ignored] = -100
    return {"tokens": tokens, "labels": labels}


def one(step):
    return [batch(step)]


def quiet(model, batches, settings, **options):
    return train(model, batches, settings, progress=False, **options)


# --- the learning rate ----------------------------------------------------------------------------


def test_the_learning_rate_rises_in_a_line_and_falls_along_a_cosine():
    settings = TrainSettings(steps=100, learning_rate=2.0, warmup_steps=20, final_fraction=0.25)
    rates = [learning_rate(step, settings) for step in range(130)]
    assert rates[:20] == pytest.approx([0.1 * (step + 1) for step in range(20)])
    assert rates[20] == 2.0
    assert rates[60] == pytest.approx((2.0 + 0.5) / 2)
    assert rates[40] == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[100:] == pytest.approx([0.5] * 30)


def test_the_learning_rate_of_each_step_is_the_one_that_adamw_used():
    settings = TrainSettings(steps=6, learning_rate=1e-2, warmup_steps=2)
    history = quiet(Tiny(), one, settings)
    expected = [learning_rate(step, settings) for step in range(6)]
    assert [row.learning_rate for row in history] == expected
    own = train_by_hand(Tiny(), one, settings)
    ours = Tiny()
    quiet(ours, one, settings)
    for name, weight in own.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def train_by_hand(model, batches, settings):
    """The same training, without anything that makes a loop long."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        optimizer.zero_grad()
        (micro,) = batches(step)
        model(**micro).backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
    return model


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


@pytest.mark.parametrize("lengths", [(24, 24, 24), (40, 8, 16)])
@pytest.mark.parametrize("ignored", [(0, 0, 0), (3, 8, 1)])
def test_accumulated_micro_batches_are_one_large_batch(lengths, ignored):
    parts = [
        batch(i, length=n, ignored=skip)
        for i, (n, skip) in enumerate(zip(lengths, ignored, strict=True))
    ]
    whole = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    settings = TrainSettings(steps=1, max_grad_norm=None)
    piecewise, at_once = Tiny().double(), Tiny().double()
    accumulating = dataclasses.replace(settings, accumulation=3)
    a, left = trained_with(piecewise, lambda step: parts, accumulating)
    b, right = trained_with(at_once, lambda step: [whole], settings)
    assert a.loss == pytest.approx(b.loss, rel=1e-12)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-12)
    # What has no label is not run at all.
    assert a.tokens == sum(n for n, skip in zip(lengths, ignored, strict=True) if n > skip)
    assert b.tokens == sum(lengths)
    assert len(left) == len(list(piecewise.parameters()))
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-14)


def test_a_step_leaves_no_gradients_behind():
    model = Tiny()
    quiet(model, one, TrainSettings(steps=1))
    assert all(p.grad is None for p in model.parameters())


def test_the_norm_is_that_before_clipping_and_the_gradients_are_clipped():
    free, clipped = Tiny(), Tiny()
    norm = quiet(free, one, TrainSettings(steps=1, max_grad_norm=None)).rows[0].grad_norm
    row, left = trained_with(clipped, one, TrainSettings(steps=1, max_grad_norm=norm / 10))
    assert row.grad_norm == pytest.approx(norm)
    assert float(nn.utils.get_total_norm(left)) == pytest.approx(norm / 10, rel=1e-4)


def test_only_matrices_decay():
    class Still(Tiny):
        def forward(self, tokens, labels):
            return super().forward(tokens, labels) * 0.0  # no gradient: nothing but decay

    model = Still()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    settings = TrainSettings(steps=1, learning_rate=0.5, weight_decay=0.5)
    quiet(model, one, settings)
    for name, p in model.named_parameters():
        factor = 0.75 if p.ndim >= 2 else 1.0
        torch.testing.assert_close(p.detach(), factor * before[name])


def test_a_dataclass_is_as_good_a_batch_as_a_mapping():
    @dataclasses.dataclass(frozen=True)
    class Packed:
        tokens: torch.Tensor
        labels: torch.Tensor
        name: str = "what is no tensor does not reach the model"

    settings = TrainSettings(steps=2)
    a = quiet(Tiny(), one, settings)
    b = quiet(Tiny(), lambda step: [Packed(**batch(step))], settings)
    assert a.losses == b.losses


# --- 16 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_learns_as_well(dtype):
    settings = TrainSettings(steps=60, learning_rate=3e-2)
    plain = quiet(Tiny(), one, settings)
    model = Tiny()
    mixed = quiet(model, one, dataclasses.replace(settings, autocast=dtype))
    assert not any(row.skipped for row in mixed)
    assert mixed.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)
    assert mixed.losses[0] != plain.losses[0]
    assert mixed.losses[-1] < 0.5 < 2 < mixed.losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_float16_gradients_that_would_vanish_are_kept_by_the_scale():
    class Faint(Tiny):
        def forward(self, tokens, labels):
            return super().forward(tokens, labels) * 1e-6

    scaled, exact = (
        quiet(Faint(), one, TrainSettings(steps=1, autocast=dtype)).rows[0].grad_norm
        for dtype in (torch.float16, None)
    )
    assert scaled == pytest.approx(exact, rel=2e-2)


def test_a_float16_step_that_overflows_is_skipped_and_the_next_one_is_smaller():
    class Loud(Tiny):
        def forward(self, tokens, labels):
            return super().forward(tokens, labels) * 30.0

    model = Loud()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    same = []

    def compare(row):
        same.append(all(torch.equal(p, before[name]) for name, p in model.named_parameters()))

    settings = TrainSettings(steps=12, autocast=torch.float16)
    history = quiet(model, one, settings, on_step=compare)
    skipped = [row.skipped for row in history]
    assert skipped[0]
    assert not skipped[-1]
    first = skipped.index(False)
    assert same == [True] * first + [False] * (12 - first)


# --- what stops a run -----------------------------------------------------------------------------


class Broken(Tiny):
    """Its loss is multiplied by what a batch says."""

    def forward(self, tokens, labels, factor):
        return super().forward(tokens, labels) * factor


class BadGradient(Tiny):
    """A finite loss whose gradient is not: sqrt at 0, where a batch asks for it."""

    def forward(self, tokens, labels, factor):
        zero = (self.head.weight * (1 - factor)).sum() * 0
        return super().forward(tokens, labels) + (torch.sqrt(zero) if factor != 1 else 0)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_nan_and_infinity_stop_before_the_update_and_name_step_and_micro_batch(factor):
    model = Broken()
    seen = []

    def batches(step):
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
        bad = step == 3
        return [
            batch(step) | {"factor": torch.tensor(1.0)},
            batch(step + 50) | {"factor": torch.tensor(factor if bad else 1.0)},
        ]

    with pytest.raises(TrainingDivergedError, match=r"step 3, micro-batch 1 of 2.*loss") as caught:
        quiet(model, batches, TrainSettings(steps=9, accumulation=2))
    assert (caught.value.step, caught.value.micro_batch) == (3, 1)
    assert "PrecisionTracker" in str(caught.value)
    assert all(torch.equal(p, seen[3][name]) for name, p in model.named_parameters())
    assert not torch.equal(seen[3]["head.weight"], seen[2]["head.weight"])


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_gradient_that_is_not_finite_stops_though_the_loss_is(dtype):
    def batches(step):
        return [batch(step) | {"factor": torch.tensor(0.0 if step == 2 else 1.0)}]

    settings = TrainSettings(steps=40, autocast=dtype)
    if dtype is None:
        with pytest.raises(TrainingDivergedError, match=r"micro-batch 0 of 1.*head\.weight"):
            quiet(BadGradient(), batches, settings)
    else:  # one such step is what loss scaling skips
        assert [row.step for row in quiet(BadGradient(), batches, settings) if row.skipped] == [2]


def test_float16_stops_when_there_is_no_scale_left_to_lower():
    def batches(step):
        return [batch(step) | {"factor": torch.tensor(0.0)}]

    with pytest.raises(TrainingDivergedError, match="bfloat16") as caught:
        quiet(BadGradient(), batches, TrainSettings(steps=40, autocast=torch.float16))
    assert caught.value.step == 16  # 65,536 = 2^16, halved 16 times


def test_a_spike_of_the_loss_is_written_down_and_training_goes_on():
    def batches(step):
        return [batch(step) | {"factor": torch.tensor(100.0 if step == 5 else 1.0)}]

    history = quiet(Broken(), batches, TrainSettings(steps=10))
    assert len(history) == 10
    assert max(history, key=lambda row: row.loss).step == 5


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="accumulation=2"):
        quiet(Tiny(), one, TrainSettings(steps=1, accumulation=2))
    with pytest.raises(ValueError, match=r"batches\(0\) has no label"):
        quiet(Tiny(), lambda step: [batch(0, ignored=24)], TrainSettings(steps=1))
    for wrong in (batch(0), [torch.zeros(3)], [{"tokens": torch.zeros(3)}]):
        with pytest.raises(TypeError, match=r"a micro-batch is .*`tokens` and `labels`"):
            quiet(Tiny(), lambda step, wrong=wrong: wrong, TrainSettings(steps=1))
    with pytest.raises(ValueError, match=r"embedding\.weight is torch\.bfloat16.*autocast"):
        quiet(Tiny().bfloat16(), one, TrainSettings(steps=1))
    with pytest.raises(ValueError, match="requires gradients"):
        quiet(Tiny().requires_grad_(False), one, TrainSettings(steps=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"accumulation": 0},
        {"keep": 0},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"warmup_steps": 11},
        {"warmup_steps": -1},
        {"max_grad_norm": 0.0},
        {"final_fraction": 1.5},
        {"autocast": torch.float32},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainSettings(**{"steps": 10, **wrong})


# --- what is written down -------------------------------------------------------------------------


def test_the_history_is_a_table_with_a_row_for_each_step():
    history = quiet(Tiny(), one, TrainSettings(steps=4))
    frame = history.frame()
    assert list(frame.columns) == [
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "seconds",
        "tokens",
        "peak_bytes",
        "skipped",
        "tokens_per_s",
    ]
    assert list(frame["step"]) == [0, 1, 2, 3]
    assert list(frame["loss"]) == history.losses
    assert (frame["tokens"] == 24).all()
    assert frame["tokens_per_s"].to_numpy() == pytest.approx((24 / frame["seconds"]).to_numpy())
    assert (frame["peak_bytes"] > 10 * 2**20).all()
    assert History.from_state(history.state()) == history
    assert list(History().frame().columns) == list(frame.columns)


def test_the_chart_shows_loss_and_gradient_norm_over_the_steps():
    history = quiet(Tiny(), one, TrainSettings(steps=5))
    figure = history.chart("It learns")
    loss, norm = figure.axes
    assert list(loss.get_lines()[0].get_ydata()) == history.losses
    assert list(norm.get_lines()[0].get_ydata()) == [row.grad_norm for row in history]
    described = figure._repr_mimebundle_()["text/plain"]
    assert described.startswith("It learns. Loss over steps: ")
    with pytest.raises(ValueError, match="no step"):
        History().chart()


def test_the_bar_is_shown_unless_told_otherwise(capsys):
    quiet(Tiny(), one, TrainSettings(steps=2))
    assert capsys.readouterr().err == ""
    train(Tiny(), one, TrainSettings(steps=2))
    assert "tokens/s" in capsys.readouterr().err


@pytest.mark.parametrize("value", [[0, 4, 8], None, 3])
def test_what_is_no_tensor_is_refused_and_not_dropped(value):
    with pytest.raises(TypeError, match="cu_seqlens of a micro-batch"):
        quiet(Tiny(), lambda step: [batch(0) | {"cu_seqlens": value}], TrainSettings(steps=1))


@pytest.mark.parametrize("value", [Path("x"), {"a": Path("x")}, [object()], torch.float32])
def test_what_a_checkpoint_could_not_give_back_is_refused_at_once(value, tmp_path):
    with pytest.raises(TypeError, match="kept as plain values"):
        train(Tiny(), one, TrainSettings(steps=1), folder=tmp_path, course={"data": value})
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_and_lists_are_taken_as_plain_ones():
    settings = TrainSettings(2, learning_rate=np.float64(0.5), betas=[0.9, 0.95])
    assert type(settings.learning_rate) is float
    assert settings == TrainSettings(2, learning_rate=0.5, betas=(0.9, 0.95))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"steps": 2.5}, "whole number"), ({"betas": (0.9,)}, "two"), ({"betas": (0.9, 1.0)}, "two")],
)
def test_settings_of_another_kind_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        TrainSettings(**{"steps": 1, **wrong})


def test_what_diverges_hands_over_the_curves_of_the_steps_before():
    with pytest.raises(TrainingDivergedError) as caught:
        quiet(Tiny(), one, TrainSettings(steps=5, learning_rate=1e30))
    assert len(caught.value.history) == caught.value.step > 0
