import copy
import io

import pytest
import torch
from torch import nn

from labsupport.precision import (
    FlashAttentionConfig,
    MixedPrecisionOptimizer,
    apply_precision_policy,
    compute_loss,
)
from tests.precision.policy_models import VOCABULARY, gpt2, llama, tokens

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CONFIGS = {
    "bfloat16": FlashAttentionConfig(),
    "float16": FlashAttentionConfig.float16(),
    "float32": FlashAttentionConfig.float32(),
}
IN_EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Tiny(nn.Module):
    """Token in, logits of the next one out; the head is tied to the table."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x + self.down(torch.tanh(self.up(self.norm(x)))))


def tiny(config):
    torch.manual_seed(0)
    model = Tiny()
    apply_precision_policy(model, config)
    return model


def step(model, optimizer, factor=1.0):
    ids = torch.arange(11)
    loss = compute_loss(model(ids), ids.roll(1))
    optimizer.backward(loss * factor)
    taken = optimizer.step()
    optimizer.zero_grad()
    return taken, loss.item()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# --- whole models ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "name"), [(gpt2, "bfloat16"), (llama, "float16")])
def test_a_language_model_learns_its_batch(make, name):
    model, config = make(), CONFIGS[name]
    apply_precision_policy(model, config)
    optimizer = MixedPrecisionOptimizer(model, config, lr=1e-2, max_norm=1.0)
    backbone = model.transformer if make is gpt2 else model.model
    losses = []
    for _ in range(4):
        hidden = backbone(tokens()).last_hidden_state
        loss = compute_loss(hidden[:, :-1], tokens()[:, 1:], head=model.lm_head, chunk_size=8)
        optimizer.backward(loss)
        assert optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=0.05)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.5


# --- master weights -------------------------------------------------------------------------------


def test_updates_that_vanish_in_bfloat16_add_up_in_the_masters():
    # 0.001 is less than half of the distance from 1 to the next bfloat16 number.
    def move_ten_times(make_optimizer):
        model = nn.Linear(1, 1, bias=False, dtype=BF16)
        model.weight.data.fill_(1)
        optimizer = make_optimizer(model)
        for _ in range(10):
            model(torch.ones(1, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.item()

    assert move_ten_times(lambda model: torch.optim.SGD(model.parameters(), lr=1e-3)) == 1
    mended = move_ten_times(
        lambda model: MixedPrecisionOptimizer(
            model, FlashAttentionConfig(), torch.optim.SGD, lr=1e-3
        )
    )
    assert mended == torch.tensor(0.99).to(BF16).item()


@IN_EACH
def test_the_model_holds_the_rounded_masters(config):
    model = tiny(config)
    optimizer = MixedPrecisionOptimizer(model, config, lr=1e-2)
    step(model, optimizer)
    masters = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
    assert {master.dtype for master in masters} == {F32}
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert (parameter is master) == (parameter.dtype == F32)


def test_under_a_float32_policy_it_is_adamw_bit_for_bit():
    config = FlashAttentionConfig.float32()
    model, other = tiny(config), Tiny()
    other.load_state_dict(model.state_dict())
    ours = MixedPrecisionOptimizer(
        model, config, lr=1e-2, weight_decay=0.1, max_norm=0.5, fused=True
    )
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    ids = torch.arange(11)
    for _ in range(5):
        step(model, ours)
        compute_loss(other(ids), ids.roll(1)).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
    assert ours.scaler is None
    assert equal(weights(model), weights(other))


def test_micro_batches_add_up_in_float32():
    model = nn.Linear(1, 1, bias=False, dtype=BF16)
    optimizer = MixedPrecisionOptimizer(model, FlashAttentionConfig(), torch.optim.SGD, lr=1.0)
    for value in [256.0] + [1.0] * 8:  # 256 + 1 is 256 in bfloat16
        optimizer.backward(model(torch.tensor([value], dtype=BF16)).sum())
    (master,) = optimizer.optimizer.param_groups[0]["params"]
    assert master.grad.item() == 264
    assert model.weight.grad is None


# --- loss scaling ---------------------------------------------------------------------------------


def test_gradients_too_small_for_float16_arrive_because_the_loss_is_scaled():
    config = FlashAttentionConfig.float16()
    x = torch.full((1,), 2.0**-10, dtype=F16)
    plain = nn.Linear(1, 1, bias=False, dtype=F16)
    (plain(x).float().sum() * 2.0**-16).backward()
    assert plain.weight.grad.item() == 0
    model = nn.Linear(1, 1, bias=False, dtype=F16)
    optimizer = MixedPrecisionOptimizer(model, config, torch.optim.SGD, lr=1.0, max_norm=1e9)
    optimizer.backward(model(x).float().sum() * 2.0**-16)
    assert optimizer.step()
    assert optimizer.grad_norm.item() == 2.0**-26


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_halves_the_scale(fused):
    config = FlashAttentionConfig.float16()
    model = tiny(config)
    optimizer = MixedPrecisionOptimizer(model, config, lr=1e-2, init_scale=1024.0, fused=fused)
    assert step(model, optimizer)[0]
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    assert not step(model, optimizer, factor=1e6)[0]
    assert optimizer.scale == 512
    assert equal(weights(model), before)
    assert equal(optimizer.state_dict()["masters"].values(), state["masters"].values())
    assert step(model, optimizer)[0]
    assert optimizer.scale == 512
    assert not equal(weights(model), before)


def test_there_is_a_scaler_where_anything_is_in_float16():
    config = FlashAttentionConfig()
    optimizer = MixedPrecisionOptimizer(tiny(config), config)
    assert optimizer.scaler is None
    assert optimizer.scale == 1
    config = FlashAttentionConfig.float32(attention="float16")  # activations are enough
    assert MixedPrecisionOptimizer(tiny(config), config).scale == 2.0**16


# --- what must not happen silently ----------------------------------------------------------------


def backward(model, optimizer):
    ids = torch.arange(11)
    optimizer.backward(compute_loss(model(ids), ids.roll(1)))


def test_an_optimizer_from_before_the_policy_refuses_to_train():
    model, config = Tiny(), CONFIGS["bfloat16"]
    optimizer = MixedPrecisionOptimizer(model, config, lr=1e-2)
    apply_precision_policy(model, config)
    message = "float32 .* is bfloat16 .* Build the optimizer after the policy"
    with pytest.raises(RuntimeError, match=message):
        backward(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    # The same the other way round: masters of a bfloat16 model that has become float32.
    model = tiny(CONFIGS["bfloat16"])
    optimizer = MixedPrecisionOptimizer(model, CONFIGS["bfloat16"])
    apply_precision_policy(model, CONFIGS["float32"])
    with pytest.raises(RuntimeError, match="is float32"):
        optimizer.step()


def load(model):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


@torch.no_grad()
def halve(model):
    model.up.weight.mul_(0.5)


def exchange(model):
    model.up.weight.data = model.up.weight.data + 1


@pytest.mark.parametrize(("change", "steps"), [(load, 0), (halve, 2), (exchange, 2)])
def test_changed_weights_are_not_overwritten_by_old_masters(change, steps):
    config = CONFIGS["bfloat16"]
    model = tiny(config)
    optimizer = MixedPrecisionOptimizer(model, config, torch.optim.SGD, lr=1e-2)
    for _ in range(steps):
        step(model, optimizer)
    change(model)
    changed = weights(model)
    with pytest.raises(RuntimeError, match=r"optimizer\.copy_weights\(\)"):
        backward(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match=r"optimizer\.copy_weights\(\)"):
        optimizer.step()
    assert equal(weights(model), changed)
    optimizer.copy_weights()
    optimizer.step()  # gradients of 0
    assert equal(weights(model), changed)
    masters = optimizer.state_dict()["masters"]
    assert equal((master.to(BF16) for master in masters.values()), changed)
    optimizer.zero_grad()
    assert step(model, optimizer)[0]


@IN_EACH
def test_legitimate_use_raises_nothing(config):
    model = tiny(config)
    optimizer = MixedPrecisionOptimizer(model, config, lr=1e-2, init_scale=64.0, max_norm=0.1)
    model.norm.requires_grad_(False)
    backward(model, optimizer)
    backward(model, optimizer)  # micro-batches
    if optimizer.scaler is None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.norm.requires_grad_(True)
    step(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    # Other weights for an evaluation, and back; and a checkpoint in the unusual order.
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    load(model)
    model.load_state_dict(saved)
    step(model, optimizer)
    optimizer.load_state_dict(state)
    model.load_state_dict(saved)
    assert step(model, optimizer)[0]


# Weights in float16, and activations only.
SCALED = FlashAttentionConfig.float16(), FlashAttentionConfig.float32(attention="float16")


@pytest.mark.parametrize(("config", "steps"), [(SCALED[0], 0), (SCALED[1], 1)])
def test_unscaled_gradients_are_not_divided_by_the_scale(config, steps):
    model, ids = tiny(config), torch.arange(11)
    optimizer = MixedPrecisionOptimizer(model, config, lr=1e-2, init_scale=64.0)
    for _ in range(steps):
        step(model, optimizer)
    before = weights(model)
    compute_loss(model(ids), ids.roll(1)).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.backward\(loss\) in place of loss"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"optimizer\.backward\(loss\) in place of loss"):
        backward(model, optimizer)  # would add scaled gradients to those
    assert equal(weights(model), before)
    optimizer.zero_grad()
    assert step(model, optimizer)[0]


@pytest.mark.parametrize("config", SCALED)
def test_scaled_gradients_are_not_added_to_those_of_the_last_step(config):
    model = tiny(config)
    optimizer = MixedPrecisionOptimizer(model, config, lr=1e-2, init_scale=64.0)
    backward(model, optimizer)
    assert optimizer.step()
    for use in (optimizer.step, lambda: backward(model, optimizer)):
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) after each step"):
            use()


# --- groups, states, errors -----------------------------------------------------------------------


def test_groups_keep_their_options_and_schedulers_work():
    config = FlashAttentionConfig()
    model = tiny(config)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
        {"params": (p for p in model.parameters() if p.ndim == 1), "weight_decay": 0.0},
    ]
    optimizer = MixedPrecisionOptimizer(model, config, torch.optim.SGD, params=groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
    before = {name: p.detach().float() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    schedule.step()
    masters = optimizer.state_dict()["masters"]
    torch.testing.assert_close(masters["up.weight"], before["up.weight"] * 0.95)
    assert torch.equal(masters["up.bias"], before["up.bias"])
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.05, 0.05]


@IN_EACH
def test_a_run_continues_bit_for_bit_after_saving_and_loading(config):
    model = tiny(config)
    optimizer = MixedPrecisionOptimizer(model, config, lr=1e-2, init_scale=64.0)
    for _ in range(3):
        step(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    other = tiny(config)
    resumed = MixedPrecisionOptimizer(other, config, lr=1e-2)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.scale == optimizer.scale
    for _ in range(3):
        assert step(model, optimizer) == step(other, resumed)
    assert equal(weights(model), weights(other))
    masters = (each.state_dict()["masters"].values() for each in (optimizer, resumed))
    assert equal(*masters)


def test_a_state_of_another_policy_is_refused():
    low, wide = (
        MixedPrecisionOptimizer(tiny(CONFIGS[name]), CONFIGS[name])
        for name in ("bfloat16", "float32")
    )
    with pytest.raises(ValueError, match="same policy"):
        low.load_state_dict(wide.state_dict())
    scaled = MixedPrecisionOptimizer(tiny(CONFIGS["float16"]), CONFIGS["float16"])
    with pytest.raises(ValueError, match="losses are scaled"):
        scaled.load_state_dict(low.state_dict())


def test_what_cannot_be_optimized_is_refused():
    config = FlashAttentionConfig()
    model = tiny(config)
    with pytest.raises(ValueError, match="not one of the model's"):
        MixedPrecisionOptimizer(model, config, params=[nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="no parameter to train"):
        MixedPrecisionOptimizer(nn.ReLU(), config)
    twice = [{"params": [model.up.weight]}, {"params": [model.up.weight]}]
    with pytest.raises(ValueError, match=r"up\.weight is in more than one group"):
        MixedPrecisionOptimizer(model, config, params=twice)
    with pytest.raises(RuntimeError, match="call backward"):
        MixedPrecisionOptimizer(model, config).step()


def test_float16_weights_without_masters_are_refused():
    with pytest.warns(UserWarning, match="optimizer"):
        config = FlashAttentionConfig.float16(optimizer="float16")
    with pytest.raises(ValueError, match="needs masters in float32"):
        MixedPrecisionOptimizer(tiny(config), config)
