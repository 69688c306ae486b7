import copy
import io
import math

import pytest
import torch
from torch import nn

from labsupport.precision import (
    FlashAttentionConfig,
    MixedPrecisionOptimizer,
    apply_precision_policy,
    compute_loss,
)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CONFIGS = {
    "bfloat16": FlashAttentionConfig(),
    "float16": FlashAttentionConfig.float16(),
    "float32": FlashAttentionConfig.float32(),
}
IDS = torch.arange(11)


class Tiny(nn.Module):
    """Token in, logits of the next one out; the head is tied to the table."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x + self.mlp(self.norm(x)))


def tiny(config, optimizer=torch.optim.AdamW, lr=1e-2, **options):
    """A model under a policy, and its optimizer."""
    torch.manual_seed(0)
    model = Tiny()
    apply_precision_policy(model, config)
    return model, MixedPrecisionOptimizer(model, config, optimizer, lr=lr, **options)


def loss_of(model):
    return compute_loss(model(IDS), IDS.roll(1))


def step(model, optimizer, factor=1.0):
    loss = loss_of(model)
    optimizer.backward(loss * factor)
    taken = optimizer.step()
    optimizer.zero_grad()
    return taken, loss.item()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def masters_of(optimizer):
    return list(optimizer.state_dict()["masters"].values())


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def one_weight(dtype, config, **options):
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    return model, MixedPrecisionOptimizer(
        model, CONFIGS[config], torch.optim.SGD, lr=1.0, **options
    )


# --- master weights -------------------------------------------------------------------------------


def test_under_a_float32_policy_it_is_adamw_bit_for_bit():
    model, ours = tiny(CONFIGS["float32"], weight_decay=0.1, fused=True)
    other = copy.deepcopy(model)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(5):
        step(model, ours)
        loss_of(other).backward()
        theirs.step()
        theirs.zero_grad()
    assert ours.scaler is None
    assert equal(weights(model), weights(other))


def test_micro_batches_add_up_in_float32():
    model, optimizer = one_weight(BF16, "bfloat16")
    for value in [256.0] + [1.0] * 8:  # 256 + 1 is 256 in bfloat16
        optimizer.backward(model(torch.tensor([value], dtype=BF16)).sum())
    (master,) = optimizer.optimizer.param_groups[0]["params"]
    assert master.grad.item() == 264
    assert model.weight.grad is master.grad
    model.zero_grad()
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        optimizer.step()


# --- loss scaling ---------------------------------------------------------------------------------


def test_gradients_too_small_for_float16_arrive_because_the_loss_is_scaled():
    model, optimizer = one_weight(F16, "float16")
    before = masters_of(optimizer)[0].clone()
    x = torch.full((1,), 2.0**-10, dtype=F16)  # 2^-26 is less than half of the smallest subnormal
    optimizer.backward(model(x).float().sum() * 2.0**-16)
    assert optimizer.step()
    assert before - masters_of(optimizer)[0] == pytest.approx(2.0**-26, rel=0.5)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_halves_the_scale(fused):
    model, optimizer = tiny(CONFIGS["float16"], init_scale=1024.0, fused=fused)
    assert step(model, optimizer)[0]
    before, masters = weights(model), [each.clone() for each in masters_of(optimizer)]
    assert not step(model, optimizer, factor=1e6)[0]
    assert equal([*weights(model), *masters_of(optimizer)], [*before, *masters])
    assert optimizer.scale == 512
    assert step(model, optimizer)[0]
    assert optimizer.scale == 512
    assert not equal(weights(model), before)


# --- what must not happen silently ----------------------------------------------------------------


def test_an_optimizer_from_before_the_policy_refuses_to_train():
    model, config = Tiny(), CONFIGS["bfloat16"]
    optimizer = MixedPrecisionOptimizer(model, config, lr=1e-2)
    apply_precision_policy(model, config)
    with pytest.raises(RuntimeError, match="build the optimizer after the policy"):
        optimizer.backward(loss_of(model))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_legitimate_use_raises_nothing_and_the_model_holds_the_rounded_masters(config):
    model, optimizer = tiny(config, init_scale=64.0)
    model.norm.requires_grad_(False)
    optimizer.backward(loss_of(model))
    optimizer.backward(loss_of(model))  # micro-batches
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.norm.requires_grad_(True)
    step(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    # A checkpoint in the unusual order.
    saved, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    step(model, optimizer)
    optimizer.load_state_dict(state)
    model.load_state_dict(saved)
    assert step(model, optimizer)[0]
    masters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert master.dtype == F32
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert (parameter is master) == (parameter.dtype == F32)


# Weights in float16, and activations only.
@pytest.mark.parametrize(
    ("config", "steps"),
    [(FlashAttentionConfig.float16(), 0), (FlashAttentionConfig.float32(attention="float16"), 1)],
)
def test_gradients_without_the_scale_or_of_the_last_step_are_refused(config, steps):
    model, optimizer = tiny(config, init_scale=64.0)
    for _ in range(steps):
        step(model, optimizer)

    def refused(message):
        for use in (optimizer.step, lambda: optimizer.backward(loss_of(model))):
            with pytest.raises(RuntimeError, match=message):
                use()

    before = weights(model)
    loss_of(model).backward()  # would be divided by the scale, or added to scaled gradients
    refused(r"optimizer\.backward\(loss\) in place of loss")
    assert equal(weights(model), before)
    optimizer.zero_grad()
    optimizer.backward(loss_of(model))
    assert optimizer.step()
    refused(r"zero_grad\(\) after each step")


def clipped(config, clip):
    """The norm that clipping returns, and the one of the change that a step of SGD makes."""
    model, optimizer = tiny(config, torch.optim.SGD, lr=1.0, init_scale=1024.0)
    before = copy.deepcopy(optimizer.masters)
    for _ in range(2):
        optimizer.backward(loss_of(model))
    norm = clip(model, optimizer)
    assert optimizer.step()
    change = [before[name] - master for name, master in optimizer.masters.items()]
    return norm.item(), nn.utils.get_total_norm(change).item()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_clipping_sees_the_gradients_without_the_loss_scale(config):
    norm, unclipped = clipped(config, lambda _, optimizer: optimizer.clip_grad_norm_(math.inf))
    assert norm == pytest.approx(unclipped, rel=1e-5)
    assert norm > 0.1
    assert clipped(config, lambda _, optimizer: optimizer.clip_grad_norm_(0.1)) == (
        pytest.approx(norm), pytest.approx(0.1, rel=1e-4),
    )  # fmt: skip

    def by_torch(model, optimizer):
        return nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    if config == CONFIGS["float16"]:
        with pytest.raises(RuntimeError, match=r"in place of torch\.nn\.utils"):
            clipped(config, by_torch)
    else:
        assert clipped(config, by_torch) == (pytest.approx(norm), pytest.approx(0.1, rel=1e-4))


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan])
def test_a_limit_that_would_turn_gradients_around_is_refused(max_norm):
    with pytest.raises(ValueError, match="max_norm"):
        clipped(CONFIGS["bfloat16"], lambda _, optimizer: optimizer.clip_grad_norm_(max_norm))


def test_the_norm_of_sixteen_bit_gradients_is_taken_in_float32():
    with pytest.warns(UserWarning, match="optimizer in bfloat16"):
        config = FlashAttentionConfig(optimizer="bfloat16")
    model = nn.Linear(2, 1, bias=False, dtype=BF16)
    optimizer = MixedPrecisionOptimizer(model, config, torch.optim.SGD, lr=1.0)
    optimizer.backward(model(torch.ones(2, dtype=BF16)).sum())
    assert optimizer.clip_grad_norm_(math.inf).item() == pytest.approx(2**0.5, rel=1e-6)


# --- groups, states, errors -----------------------------------------------------------------------


def test_groups_keep_their_options_and_schedulers_work():
    model, config = Tiny(), CONFIGS["bfloat16"]
    apply_precision_policy(model, config)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": (p for p in model.parameters() if p.ndim == 1), "weight_decay": 0.0},
    ]
    optimizer = MixedPrecisionOptimizer(model, config, torch.optim.SGD, groups=groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    before = {name: p.detach().float() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter, dtype=F32)
    optimizer.step()
    schedule.step()
    masters = optimizer.state_dict()["masters"]
    torch.testing.assert_close(masters["mlp.0.weight"], before["mlp.0.weight"] * 0.95)
    assert torch.equal(masters["mlp.0.bias"], before["mlp.0.bias"])
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.05, 0.05]


def test_a_run_continues_bit_for_bit_after_saving_and_loading():
    model, optimizer = tiny(CONFIGS["float16"], init_scale=64.0)
    for _ in range(3):
        step(model, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    saved = torch.load(file)
    other, resumed = tiny(CONFIGS["float16"])
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.scale == optimizer.scale == 64
    for _ in range(3):
        assert step(model, optimizer) == step(other, resumed)
    ours, theirs = weights(model) + masters_of(optimizer), weights(other) + masters_of(resumed)
    assert equal(ours, theirs)


def test_what_cannot_be_optimized_or_loaded_is_refused():
    config = CONFIGS["bfloat16"]
    model, low = tiny(config)
    twice = [{"params": [model.mlp[0].weight]}, {"params": [model.mlp[0].weight]}]
    for own, groups, message in (
        (model, [{"params": [nn.Parameter(torch.zeros(2))]}], "not one of the model's"),
        (nn.ReLU(), None, "no parameter to train"),
        (model, twice, r"\(mlp\.0\.weight\) is .* in two groups"),
    ):
        with pytest.raises(ValueError, match=message):
            MixedPrecisionOptimizer(own, config, groups=groups)
    with pytest.raises(RuntimeError, match="call backward"):
        low.step()
    smaller = low.state_dict()
    smaller["masters"]["mlp.0.bias"] = torch.zeros(1)  # copy_ would fill all 16 with it
    for state in (
        tiny(CONFIGS["float32"])[1].state_dict(), smaller, low.state_dict() | {"scaler": {}},
    ):  # fmt: skip
        before = weights(model)
        with pytest.raises(ValueError, match="same policy"):
            low.load_state_dict(state)
        assert equal(weights(model), before)
    other = tiny(config, torch.optim.SGD)[1].state_dict()
    with pytest.raises(ValueError, match="another optimizer than AdamW: it has no amsgrad"):
        low.load_state_dict(other)
    one = {"params": model.mlp[0].weight}
    (master,) = MixedPrecisionOptimizer(model, config, groups=[one]).masters
    assert master == "mlp.0.weight"
    with pytest.raises(TypeError, match="a group is a mapping"):
        MixedPrecisionOptimizer(model, config, groups=model.parameters())
    with pytest.raises(ValueError, match="init_scale is nan"):
        tiny(CONFIGS["float16"], init_scale=math.nan)
