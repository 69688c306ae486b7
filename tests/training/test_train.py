"""The loop's arithmetic: what a step computes, when it stops, what it writes down."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from labsupport.precision import FlashAttentionConfig
from labsupport.training import (
    Checkpoints,
    Decoder,
    DecoderConfig,
    History,
    MemoryOptions,
    TrainConfig,
    TrainingDivergedError,
    learning_rate,
    train,
)
from labsupport.training.train import write_text

VOCABULARY, WIDTH = 13, 16
BF16, F16 = torch.bfloat16, torch.float16
POLICIES = {BF16: FlashAttentionConfig.bfloat16(), F16: FlashAttentionConfig.float16()}
in_16_bits = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


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


def test_a_run_is_adamw_with_the_rate_of_each_step_and_leaves_no_gradients():
    settings = TrainConfig(steps=6, learning_rate=1e-2, warmup_steps=2)
    by_hand, ours = train_by_hand(Tiny(), one, settings), Tiny()
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


@pytest.mark.parametrize(
    ("lengths", "ignored"),
    [((24, 24, 24), (0, 0, 0)), ((40, 8, 16), (0, 0, 0)), ((40, 8, 16), (3, 8, 1))],
)
def test_accumulated_micro_batches_are_one_large_batch(lengths, ignored):
    pairs = list(zip(lengths, ignored, strict=True))
    parts = [batch(i, length=n, ignored=skip) for i, (n, skip) in enumerate(pairs)]
    whole = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    settings = TrainConfig(steps=1, max_grad_norm=None)
    accumulating = replace(settings, gradient_accumulation_steps=3)
    a, left = trained_with(Tiny().double(), lambda step: parts, accumulating)
    b, right = trained_with(Tiny().double(), lambda step: [whole], settings)
    assert a.loss == pytest.approx(b.loss, rel=1e-12)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-12)
    # A micro-batch without labels is not run at all.
    assert a.tokens == sum(n for n, skip in pairs if n > skip)
    assert b.tokens == sum(lengths)
    assert len(left) == len(list(Tiny().parameters()))
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-14)


def test_the_norm_is_that_before_clipping_and_the_gradients_are_clipped():
    norm = quiet(Tiny(), one, TrainConfig(steps=1, max_grad_norm=None)).rows[0].grad_norm
    row, left = trained_with(Tiny(), one, TrainConfig(steps=1, max_grad_norm=norm / 10))
    assert row.grad_norm == pytest.approx(norm)
    assert float(nn.utils.get_total_norm(left)) == pytest.approx(norm / 10, rel=1e-4)


def test_only_matrices_decay():
    model = Tiny(factor=0.0)  # no gradient: nothing but decay
    before = weights(model)
    quiet(model, one, TrainConfig(steps=1, learning_rate=0.5, weight_decay=0.5))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), (0.75 if p.ndim >= 2 else 1.0) * before[name])


def test_a_dataclass_is_as_good_a_batch_as_a_mapping():
    @dataclass(frozen=True)
    class Packed:
        tokens: torch.Tensor
        labels: torch.Tensor
        name: str = "what is no tensor does not reach the model"

    settings = TrainConfig(steps=2)
    dataclasses = quiet(Tiny(), lambda step: [Packed(**batch(step))], settings)
    assert dataclasses.losses == quiet(Tiny(), one, settings).losses


# --- 16 bits --------------------------------------------------------------------------------------


@in_16_bits
@pytest.mark.parametrize("by", ["autocast", "policy"])
def test_in_16_bits_it_learns_as_well(dtype, by):
    settings = TrainConfig(steps=60, learning_rate=3e-2)
    plain = quiet(Tiny(), one, settings)
    model = Tiny()
    mixed = quiet(
        model, one, replace(settings, **{by: dtype if by == "autocast" else POLICIES[dtype]})
    )
    assert not any(row.skipped for row in mixed.rows[1:])  # one float16 overflow lowers the scale
    assert mixed.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)
    assert mixed.losses[0] != plain.losses[0]
    assert mixed.losses[-1] < 0.5 < 2 < mixed.losses[0]
    assert model.head.weight.dtype == (torch.float32 if by == "autocast" else dtype)


def test_a_float32_policy_is_no_policy_bit_for_bit():
    settings = TrainConfig(steps=5)
    policy = replace(settings, policy=FlashAttentionConfig.float32())
    assert quiet(Tiny(), one, policy).losses == quiet(Tiny(), one, settings).losses


GPT2 = DecoderConfig(vocab_size=13, width=32, layers=2, heads=4)
LLAMA = replace(GPT2, kv_heads=2, mlp_width=48, norm="rms", mlp="swiglu", bias=False, tied=False)


@in_16_bits
@pytest.mark.parametrize(
    ("config", "savings"),
    [(GPT2, MemoryOptions("standard", True, 7, 7, BF16)), (LLAMA, MemoryOptions(loss_chunk=7)),
     (LLAMA, MemoryOptions(checkpoint=True, mlp_chunk=7))],
)  # fmt: skip
def test_savings_work_under_each_policy(dtype, config, savings):
    def losses(savings, **more):
        torch.manual_seed(0)
        return quiet(Decoder(config, savings), one, TrainConfig(3, 1e-2, **more))

    exact, under = losses(None), losses(savings, policy=POLICIES[dtype])
    assert under.losses == pytest.approx(exact.losses, rel=1e-2)
    norms = [row.grad_norm for row in exact]
    assert [row.grad_norm for row in under] == pytest.approx(norms, rel=0.05)


def test_updates_below_half_an_ulp_add_up_in_the_masters(tmp_path):
    class OneWeight(Tiny):
        """Its gradient is 1, so that AdamW moves it by the learning rate, step after step."""

        def forward(self, tokens, labels):
            return super().forward(tokens, labels) * 0 + self.head.weight[0, 0].float()

    # 1 - 2^-8 is the next bfloat16 number below 1. A step of 2^-14 alone rounds back to 1.
    model = OneWeight()
    with torch.no_grad():
        model.head.weight.fill_(1.0)
    rate = {"learning_rate": 2**-14, "final_fraction": 1, "weight_decay": 0}
    seen = []
    quiet(
        model,
        one,
        TrainConfig(steps=64, policy=POLICIES[BF16], **rate),
        folder=tmp_path,
        on_step=lambda row: seen.append(model.head.weight[0, 0].item()),
    )
    assert seen[:30] == [1.0] * 30
    assert seen[-1] == 1 - 2**-8
    master = Checkpoints(tmp_path).load_newest()["optimizer"]["masters"]["head.weight"]
    assert master.dtype == torch.float32
    assert master[0, 0].item() == pytest.approx(1 - 64 * 2**-14, abs=1e-6)


def test_float16_gradients_that_would_vanish_are_kept_by_the_scale():
    scaled, exact = (
        quiet(Tiny(factor=1e-6), one, TrainConfig(steps=1, autocast=dtype)).rows[0].grad_norm
        for dtype in (F16, None)
    )
    assert scaled == pytest.approx(exact, rel=2e-2)


@pytest.mark.parametrize("how", [{"autocast": F16}, {"policy": POLICIES[F16]}], ids=list)
def test_a_float16_step_that_overflows_is_skipped_and_the_next_one_is_smaller(how):
    model, unchanged = Tiny(factor=30.0), []
    before = model.head.weight.detach().clone()

    def compare(row):
        unchanged.append(torch.equal(model.head.weight, before.to(model.head.weight.dtype)))

    history = quiet(model, one, TrainConfig(steps=12, **how), on_step=compare)
    skipped = [row.skipped for row in history]
    first = skipped.index(False)
    assert first > 0
    assert not skipped[-1]
    assert unchanged == [True] * first + [False] * (12 - first)


# --- what stops a run -----------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_nan_and_infinity_stop_before_the_update_and_name_step_and_micro_batch(factor):
    model, seen = Tiny(), []

    def batches(step):
        seen.append(weights(model))
        return [batch(step), batch(step + 50, factor=factor if step == 3 else 1.0)]

    with pytest.raises(TrainingDivergedError, match=r"step 3, micro-batch 1 of 2.*loss") as caught:
        quiet(model, batches, TrainConfig(steps=9, gradient_accumulation_steps=2))
    assert (caught.value.step, caught.value.micro_batch) == (3, 1)
    assert [row.step for row in caught.value.history] == [0, 1, 2]
    assert "PrecisionTracker" in str(caught.value)
    assert same(model, seen[3])
    assert not same(model, seen[2])


@pytest.mark.parametrize("how", [{}, {"policy": POLICIES[BF16]}, {"autocast": F16}], ids=list)
def test_a_gradient_that_is_not_finite_stops_though_the_loss_is(how):
    model, seen = BadGradient(), []

    def batches(step):
        seen.append(weights(model))
        return [batch(step, factor=0.0 if step == 2 else 1.0)]

    settings = TrainConfig(steps=4, **how)
    if "autocast" in how:  # one such step is what loss scaling skips
        assert [row.step for row in quiet(model, batches, settings) if row.skipped] == [2]
        return
    with pytest.raises(TrainingDivergedError, match=r"step 2, micro-batch 0 of 1.*norm is nan"):
        quiet(model, batches, settings)
    assert same(model, seen[2])
    assert not same(model, seen[1])


def test_float16_stops_when_there_is_no_scale_left_to_lower():
    with pytest.raises(TrainingDivergedError, match="bfloat16") as caught:
        quiet(
            BadGradient(),
            lambda step: [batch(step, factor=0.0)],
            TrainConfig(steps=40, autocast=F16),
        )
    assert caught.value.step == 16  # 65,536 = 2^16, halved 16 times


def test_a_spike_of_the_loss_is_written_down_and_training_goes_on():
    def batches(step):
        return [batch(step, factor=100.0 if step == 5 else 1.0)]

    history = quiet(Tiny(), batches, TrainConfig(steps=10))
    assert max(history, key=lambda row: row.loss).step == 5
    assert len(history) == 10


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        quiet(Tiny(), one, TrainConfig(steps=1, gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match=r"batches\(0\) has no label"):
        quiet(Tiny(), lambda step: [batch(0, ignored=24)], TrainConfig(steps=1))
    other = batch(0) | {"cu_seqlens": [0, 4, 8]}
    for wrong in (batch(0), [torch.zeros(3)], [{"tokens": torch.zeros(3)}], [other]):
        with pytest.raises(TypeError, match=r"a micro-batch is .*`tokens` and `labels`"):
            quiet(Tiny(), lambda step, wrong=wrong: wrong, TrainConfig(steps=1))
    with pytest.raises(ValueError, match=r"embedding\.weight is torch\.bfloat16.*autocast"):
        quiet(Tiny().bfloat16(), one, TrainConfig(steps=1))
    with pytest.raises(ValueError, match="requires gradients"):
        quiet(Tiny().requires_grad_(False), one, TrainConfig(steps=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"gradient_accumulation_steps": 0},
        {"keep": 0},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"warmup_steps": 11},
        {"warmup_steps": -1},
        {"autocast": torch.float32},
        {"autocast": BF16, "policy": POLICIES[BF16]},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainConfig(**{"steps": 10, **wrong})


# --- what is written down -------------------------------------------------------------------------


def test_the_history_is_a_table_and_a_chart_with_a_row_for_each_step():
    history = quiet(Tiny(), one, TrainConfig(steps=4))
    frame = history.frame()
    columns = "step loss grad_norm learning_rate seconds tokens peak_bytes skipped validation_loss"
    assert list(frame.columns) == [*columns.split(), "tokens_per_s"]
    assert list(frame["step"]) == [0, 1, 2, 3]
    assert list(frame["loss"]) == history.losses
    assert (frame["tokens"] == 24).all()
    assert frame["tokens_per_s"].to_numpy() == pytest.approx((24 / frame["seconds"]).to_numpy())
    assert (frame["peak_bytes"] > 10 * 2**20).all()
    assert History.from_state(history.state()) == history
    assert list(History().frame().columns) == list(frame.columns)
    figure = history.chart("It learns")
    loss, norm = (axes.get_lines()[0].get_ydata() for axes in figure.axes[:2])
    assert list(loss) == history.losses
    assert list(norm) == [row.grad_norm for row in history]
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


def test_a_trained_model_writes_what_it_has_learned_the_same_each_time():
    model = Tiny()
    quiet(model, one, TrainConfig(steps=60, learning_rate=3e-2))
    state = torch.get_rng_state()
    written = write_text(model.eval(), torch.tensor([[3]]), 8, context=4)[0].tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert written == write_text(model, torch.tensor([[3]]), 8, context=4)[0].tolist()
    follows = sum(b == (a * 5 + 1) % VOCABULARY for a, b in pairwise(written))
    assert len(written) == 9
    assert follows >= 6


def test_the_bar_is_shown_unless_told_otherwise(capsys):
    quiet(Tiny(), one, TrainConfig(steps=2))
    assert capsys.readouterr().err == ""
    train(Tiny(), one, TrainConfig(steps=2))
    assert "tokens/s" in capsys.readouterr().err
