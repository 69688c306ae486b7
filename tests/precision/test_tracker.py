"""A tracker changes nothing, records everything, and names the first layer that went wrong."""

import gc
import itertools
import math
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from labsupport.attention import attention
from labsupport.precision import PrecisionTracker
from labsupport.precision.dtypes import range_of
from labsupport.precision.findings import underflowed
from tests.precision.policy_models import gpt2, llama, tokens

F16, BF16 = torch.float16, torch.bfloat16


class Mlp(nn.Module):
    """A residual block that computes in place, and calls one layer twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x):
        hidden = self.up(self.act(self.up(self.norm(x))))
        hidden += x
        return hidden


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(model, other):
    ours, theirs = gradients(model), gradients(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def hooks(model):
    """Return the number of hooks of any kind that the model carries."""
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    on_parameters = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()]
    return on_modules + sum(len(hooks or ()) for hooks in itertools.chain(*on_parameters))


def rows(tracker, direction="forward"):
    frame = tracker.to_dataframe()
    return frame[frame["pass"] == direction]


def names(tracker, direction="forward"):
    return list(rows(tracker, direction)["name"])


def only(tracker, name):
    (row,) = rows(tracker).query(f"name == '{name}'").to_dict("records")
    return row


# --- the inputs of one attention call -------------------------------------------------------------


def qkv(dtype=BF16, transposed=False):
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, 2, 8, 16) if transposed else (3, 1, 8, 2, 16)
    return torch.randn(shape, generator=generator).to(dtype).unbind()


def planted(q, k, v):
    v[0, 0, 0, 0], v[0, 1, 0, 0] = math.nan, math.inf
    return q, k, v


FORTY = torch.full((1, 4, 1, 64), 40.0, dtype=F16)  # a score is 40 * 40 * 64 = 102,400


@pytest.mark.parametrize(
    ("inputs", "device", "kind", "message"),
    [
        (lambda q, k, v: (q.float(), k.float(), v), None, "mixed dtypes", "q, k float32, v bfl"),
        (lambda *x: qkv(torch.float32), "cuda", "unsupported dtype", "takes float32 on cuda"),
        (lambda *x: qkv(torch.int64), None, "unsupported dtype", "takes int64 on cpu"),
        (planted, None, "NaN", "v holds 1 NaN and 1 +inf of 256 entries"),
        (lambda *x: (FORTY, FORTY, FORTY), None, "overflow", "1.02e+05"),
    ],
)
def test_what_is_wrong_with_the_inputs_of_a_call_is_named(inputs, device, kind, message):
    tracker = PrecisionTracker()
    (found,) = tracker.track_flash_attention_input(*inputs(*qkv()), name="layer 3", device=device)
    assert (found.kind, found.where) == (kind, "layer 3")
    assert message in found.message
    assert tracker.violations == [found]
    assert f"First: {kind} at layer 3" in tracker.report()


def test_good_inputs_are_well_and_autocast_hides_no_call_of_mixed_dtypes():
    tracker = PrecisionTracker()
    assert tracker.track_flash_attention_input(*qkv(), device="cuda") == []
    assert tracker.track_flash_attention_input(FORTY / 2, FORTY / 2, FORTY) == []
    assert "2 tracked attention inputs" in tracker.report()
    q, k, v = qkv(transposed=True)
    with tracker, torch.autocast("cpu", BF16):
        F.scaled_dot_product_attention(q.float(), k.float(), v)
    assert [found.kind for found in tracker.violations] == ["mixed dtypes"]
    assert rows(tracker)["cast"][0] == "q, k float32, v bfloat16 -> bfloat16"
    with pytest.raises(RuntimeError), tracker:
        F.scaled_dot_product_attention(q.float(), k.float(), v)
    assert [found.kind for found in tracker.violations] == ["mixed dtypes"]


# --- nothing is changed ---------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "ranges"), [(gpt2, True), (llama, False)])
def test_nothing_is_changed_and_every_attention_call_is_recorded_under_its_module(build, ranges):
    plain, watched = build().bfloat16(), build().bfloat16()
    loss = plain(tokens(), labels=tokens()).loss
    loss.backward()
    assert hooks(watched) == 0
    with PrecisionTracker(watched, ranges=ranges) as tracker:
        assert hooks(watched) > 0
        watched_loss = watched(tokens(), labels=tokens()).loss
        watched_loss.backward()
    assert hooks(watched) == 0
    assert torch.equal(loss, watched_loss)
    assert same_gradients(plain, watched)
    assert tracker.violations == []
    subject = f"Precision of {type(plain).__name__}, 1 forward pass, with gradients"
    assert tracker.report().startswith(f"{subject}\nNo problems found")
    frame = tracker.to_dataframe()
    assert set(frame["pass"]) == {"forward", "backward"}
    assert "Dropout" not in set(frame["class"])
    unmeasured = frame["largest"].isna().all(), "Ranges were not recorded" in tracker.report()
    assert unmeasured == (not ranges, not ranges)
    calls = rows(tracker).query("kind == 'attention call'")
    where = ["transformer.h.{}.attn", "model.layers.{}.self_attn"][build is llama]
    assert list(calls["name"]) == [where.format(0), where.format(1)]
    assert set(calls["class"]) == {"F.scaled_dot_product_attention"}
    assert set(calls["dtype_in"]) == {"bfloat16"}
    back = rows(tracker, "backward").query("kind == 'attention call'")
    assert list(back["name"]) == list(calls["name"])[::-1]


def test_after_an_exception_every_hook_is_gone_and_no_activation_is_kept_alive():
    kept, model = [], nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    model[0].register_forward_hook(lambda module, args, out: kept.append(weakref.ref(out)))
    before, tracker = hooks(model), PrecisionTracker(model)
    modes = len(torch.overrides._get_current_function_mode_stack())
    with pytest.raises(RuntimeError, match="my own"), tracker:
        model(torch.ones(1, 4))
        gc.collect()
        assert [ref() for ref in kept] == [None]
        raise RuntimeError("my own")
    assert hooks(model) == before
    assert len(torch.overrides._get_current_function_mode_stack()) == modes
    assert names(tracker) == ["(model)", "0", "1"]


# --- what is recorded -----------------------------------------------------------------------------


STEP = 2.0**-24  # float16's smallest subnormal


def test_the_frame_has_the_documented_columns_and_counts_what_a_tensor_holds():
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU()).half()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0, 0], [-3.0, 0], [7 * STEP, 0], [0.0, 0]]))
    with PrecisionTracker(model) as tracker:
        model(torch.tensor([[1.0, 4.0]], dtype=F16)).sum().backward()
    documented = PrecisionTracker.to_dataframe.__doc__
    frame = tracker.to_dataframe()
    assert all(f"{name}," in documented or f"{name}:" in documented for name in frame)
    linear = only(tracker, "0")
    assert {linear[f"dtype_{part}"] for part in ("in", "weights", "out")} == {"float16"}
    assert (linear["largest"], linear["smallest"]) == (3.0, 7 * STEP)
    assert (linear["bottom"], linear["zero"], linear["entries"]) == (1, 1, 4)
    gradient = rows(tracker, "backward").to_dict("records")[0]
    assert (gradient["name"], gradient["largest"]) == ("1", 1.0)
    held = range_of(torch.tensor([math.inf, -math.inf, -math.inf, math.nan, 0.0, 1.0]).half())
    assert (held.inf, held.minus_inf, held.nan, held.zero) == (3, 2, 1, 1)
    assert held.nonfinite == "1 NaN and 1 +inf and 2 -inf of 6 entries"


def test_the_front_door_is_one_call():
    q, k, v = qkv(torch.float32)
    with PrecisionTracker() as tracker:
        attention(q, k, v, backend="sdpa_flash")
        attention(q=q, k=k, v=v, backend="standard", return_lse=True)
    frame = tracker.to_dataframe()[["class", "entries"]].values.tolist()
    assert frame == [["attention", q.numel()]] * 2  # not the log-sum-exp's
    assert tracker.report().startswith("Precision of attention calls\n")


def test_autocast_shows_as_implicit_casts():
    model = gpt2()
    with PrecisionTracker(model) as tracker, torch.autocast("cpu", BF16):
        model(tokens())
    for name, cast in (
        ("attn.c_attn", "float32 -> bfloat16; weights float32 -> bfloat16"),
        ("mlp.c_proj", "weights float32 -> bfloat16"),
        ("ln_1", ""),
    ):
        assert only(tracker, f"transformer.h.0.{name}")["cast"] == cast
    casts = int((rows(tracker)["cast"] != "").sum())
    assert f"{casts:4} implicit casts" in tracker.report()
    assert tracker.violations == []


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_repeated_and_recomputed_calls_are_recorded_once_each_with_their_gradients(reentrant):
    model, plain = Mlp(), Mlp()
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)

    def loss_of(mlp):
        recompute = partial(checkpoint, use_reentrant=reentrant)
        out = mlp(x) if reentrant is None else recompute(mlp, x)
        return (out * y).sum()

    loss_of(plain).backward()
    with PrecisionTracker(model) as tracker:
        loss_of(model).backward()
    assert same_gradients(plain, model)
    forward, backward = ["(model)", "norm", "up", "act", "up"], ["up", "act", "up", "norm"]
    assert (names(tracker), names(tracker, "backward")) == (forward, backward)
    assert list(rows(tracker).query("name == 'up'")["call"]) == [0, 1]
    with tracker:
        loss = loss_of(model)
    loss.backward()  # after the block: not recorded
    assert (names(tracker), names(tracker, "backward")) == (forward, [])


# --- the first layer where things went wrong ------------------------------------------------------


def filled(model, **values):
    """The model in float16, with these weights of the modules that end in these names."""
    for name, module in model.named_modules():
        if (value := values.get(name.rpartition(".")[2])) is not None:
            nn.init.constant_(module.weight, value)
    return model.half()


def planted_nan():
    model = gpt2()
    model.transformer.h[1].attn.c_attn.weight.data[0, 0] = math.nan
    return model


class Textbook(nn.Module):
    """Attention whose scores are masked with -inf before a softmax that is a module."""

    def __init__(self, softmax, hidden):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.softmax, self.hidden = nn.Linear(4, 4), softmax, hidden

    def forward(self, x):
        scores = (self.q(x) @ x.mT).masked_fill(self.hidden, -math.inf)
        return self.softmax(scores)


def two_layers(weight):
    """The gradient of the first one's output is `weight` times that of the second one's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    nn.init.constant_(model[1].weight, weight)
    return model.half()


ZEROS, HIDDEN = torch.zeros(1, 4, dtype=F16), torch.ones(3, 3, dtype=torch.bool)
MLP_0 = "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("model", "inputs", "scale", "kind", "where", "words"),
    [
        # What only passes the NaN on is not accused.
        (planted_nan, tokens(), None, "NaN", "transformer.h.1.attn.c_attn",
         ("its input was finite", "its weights hold 1 NaN of 3168 entries")),
        (lambda: filled(llama(), up_proj=6e4), tokens(), None, "overflow", f"{MLP_0}.up_proj",
         ("its weights are finite (largest 6e+04)", "use bfloat16")),
        # act_fn(gate) * up is computed by no module.
        (lambda: filled(llama(), up_proj=2e3, gate_proj=2e3), tokens(), None, "overflow",
         f"{MLP_0}.down_proj", (f"the output of {MLP_0}.up_proj before it was", "use bfloat16")),
        (Mlp, torch.full((1, 8), math.nan), None, "NaN", "(model)", ("in the input already",)),
        (lambda: two_layers(1e-5), ZEROS, 1e-4, "underflow", "the gradient of the output of 0",
         ("100.0% of its entries are 0 in float16", "Scale the loss")),
        (lambda: two_layers(100.0), ZEROS, 6e4, "overflow", "the gradient of the output of 0",
         ("the forward pass was finite", "loss scale")),
        (lambda: Textbook(nn.Softmax(-1), HIDDEN), torch.randn(2, 3, 4), None, "NaN", "softmax",
         ("18 NaN of 18 entries; its input holds 18 -inf of 18 entries", "sees no key")),
        # The model's own code, after its last module.
        (lambda: Textbook(lambda s: s.softmax(-1), HIDDEN), torch.randn(2, 3, 4), None, "NaN",
         "(model)", ("Look at the code after q",)),
        # -inf alone counts where weights made it, even before a softmax.
        (lambda: filled(nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)), **{"0": -6e4}),
         torch.ones(1, 4, dtype=F16), None, "overflow", "0", ("use bfloat16",)),
    ],
)  # fmt: skip
def test_the_first_layer_where_something_goes_wrong_is_named(
    model, inputs, scale, kind, where, words
):
    model = model()
    with PrecisionTracker(model) as tracker:
        out = model(inputs)
        if scale is not None:
            (out.sum() * scale).backward()
    found = tracker.violations[0]
    assert (found.kind, found.where) == (kind, where)
    assert [part for part in words if part not in str(found)] == []
    assert f"First: {kind} at {where}" in tracker.report()


def test_scores_masked_with_minus_infinity_are_no_alarm():
    for softmax in (nn.Softmax(-1), nn.LogSoftmax(-1)):
        model = Textbook(softmax, HIDDEN.triu(1))
        with PrecisionTracker(model) as tracker:
            model(torch.randn(2, 3, 4)).tril().square().mean().backward()
        assert tracker.violations == []


def test_a_layer_that_refuses_its_input_is_named_with_the_error():
    model = gpt2()
    model.transformer.h[1].mlp.c_proj.bfloat16()
    tracker = PrecisionTracker(model)
    with pytest.raises(RuntimeError), tracker:
        model(tokens())
    (found,) = tracker.violations
    assert (found.kind, found.where) == ("mixed dtypes", "transformer.h.1.mlp.c_proj")
    assert "input float32, weights bfloat16" in found.message
    with tracker:
        model.transformer.h[0].ln_1(torch.ones(1, 32))
    assert tracker.violations == []


def test_small_float16_gradients_underflow_and_scaling_the_loss_fixes_it():
    model, ids = llama(vocab_size=400).half(), torch.randint(400, (2, 32))
    found = {}
    for scale in (2**-12, 2**10):
        model.zero_grad()
        with PrecisionTracker(model) as tracker:
            (model(ids, labels=ids).loss.float() * scale).backward()
        found[scale] = tracker.violations
    small = found[2**-12]
    assert {each.kind for each in small} == {"underflow"}
    # 62 tokens, 400 words: 1 / 62 / 2^12 = 3.9e-6 is left, a four-hundredth of it is not.
    assert small[0].where == "the gradient of the output of lm_head"
    assert small[0].message.startswith("99.8% of its entries are 0")
    assert small[0].message.endswith("the largest is 3.9e-06")
    assert "Scale the loss (torch.amp.GradScaler; here by up to 2^2" in small[0].remedy
    assert found[2**10] == []


@pytest.mark.parametrize(
    ("counts", "alive", "lost"),  # counts: pairs of (how many, times the smallest subnormal)
    [
        ([(5, 7), (5, 127)], True, True),  # half of them have 3 bits left
        ([(5, 8), (5, 127)], True, False),
        ([(5, 0), (5, 127)], True, True),
        ([(4, 0), (5, 127)], True, False),
        ([(9, 0), (1, 128)], True, False),  # ReLU may have made these zeros
        ([(3, 0)], True, True),
        ([(3, 0)], False, False),
    ],
)
def test_the_rule_of_underflow_at_its_edges(counts, alive, lost):
    values = [STEP * units for count, units in counts for _ in range(count)]
    assert underflowed(range_of(torch.tensor(values).half()), alive) == lost
