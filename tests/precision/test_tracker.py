import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from labsupport.attention import attention
from labsupport.precision import PrecisionTracker
from labsupport.precision.dtypes import range_of
from labsupport.precision.findings import underflowed

IDS = torch.arange(32).reshape(2, 16) % 29


def gpt2(**options):
    torch.manual_seed(0)
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    options = {**dropout, "vocab_size": 32, **options}
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=3, n_head=2, n_embd=16, n_positions=32,
            bos_token_id=0, eos_token_id=0, **options,
        )
    )  # fmt: skip


def llama(vocab_size=32):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=vocab_size,
        )
    )  # fmt: skip


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


def step(model, ids=IDS):
    model(ids, labels=ids).loss.backward()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def hooks(model):
    """How many hooks of any kind the model carries."""
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    on_parameters = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()]
    return on_modules + sum(len(hooks or ()) for hooks in itertools.chain(*on_parameters))


def rows(tracker, direction="forward"):
    frame = tracker.to_dataframe()
    return frame[frame["pass"] == direction]


def only(tracker, name, class_name=None):
    frame = rows(tracker)
    frame = frame[frame["name"] == name]
    if class_name:
        frame = frame[frame["class"] == class_name]
    assert len(frame) == 1
    return frame.iloc[0]


def kinds(found):
    return [violation.kind for violation in found]


# --- the inputs of one attention call -------------------------------------------------------------


def qkv(dtype=torch.bfloat16, shape=(1, 8, 2, 16)):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_that_a_kernel_here_takes_are_no_violation(dtype):
    tracker = PrecisionTracker()
    assert tracker.track_flash_attention_input(*qkv(dtype)) == []
    assert tracker.violations == []
    assert "All is well" in tracker.report()


def test_mixed_dtypes_are_named_tensor_by_tensor():
    q, k, v = qkv()
    tracker = PrecisionTracker()
    (found,) = tracker.track_flash_attention_input(q.float(), k.float(), v, name="layer 3")
    assert found.kind == "mixed dtypes"
    assert found.message.startswith("q, k float32, v bfloat16")
    assert tracker.violations == [found]
    assert "First: mixed dtypes at layer 3" in tracker.report()


def test_a_laptop_can_ask_what_a_gpu_would_say_of_float32():
    tracker = PrecisionTracker()
    (found,) = tracker.track_flash_attention_input(*qkv(torch.float32), device="cuda")
    assert found.kind == "unsupported dtype"
    assert "no flash kernel takes float32 on cuda" in found.message
    assert "bfloat16" in found.remedy
    assert tracker.track_flash_attention_input(*qkv(torch.bfloat16), device="cuda") == []
    (found,) = tracker.track_flash_attention_input(*qkv(), device="mps")
    assert "there is none" in found.message


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn, torch.bool])
def test_dtypes_that_no_attention_takes_are_unsupported(dtype):
    found = PrecisionTracker().track_flash_attention_input(*qkv(dtype))
    assert kinds(found) == ["unsupported dtype"]


def test_nan_and_infinity_are_counted_in_the_tensor_that_holds_them():
    q, k, v = qkv()
    v[0, 0, 0, 0], v[0, 1, 0, 0] = math.nan, math.inf
    (found,) = PrecisionTracker().track_flash_attention_input(q, k, v)
    assert (found.kind, found.message) == ("NaN", "v holds 1 NaN and 1 +inf of 256 entries")


def test_float16_scores_overflow_long_before_their_inputs_do():
    q, k, v = (torch.full((1, 4, 1, 64), 40.0, dtype=torch.float16) for _ in range(3))
    (found,) = PrecisionTracker().track_flash_attention_input(q, k, v)
    assert found.kind == "overflow"
    assert "1.02e+05" in found.message
    assert (q[0, :, 0] @ k[0, :, 0].T).isinf().all()
    assert PrecisionTracker().track_flash_attention_input(q / 2, k / 2, v) == []


def test_float16_near_its_end_is_a_violation():
    q, k, v = qkv(torch.float16)
    found = PrecisionTracker().track_flash_attention_input(q, k, v.new_full(v.shape, 4e4))
    assert kinds(found) == ["near overflow"]


def test_a_shape_that_no_kernel_takes_is_a_violation_and_other_ranks_are_judged_without():
    q, k, v = qkv()
    tracker = PrecisionTracker()
    assert kinds(tracker.track_flash_attention_input(q, k[..., :8], v)) == ["shapes"]
    assert tracker.track_flash_attention_input(q[0], k[0], v[0]) == []
    assert kinds(tracker.track_flash_attention_input(q[0], k[0], v[0].float())) == ["mixed dtypes"]


def test_a_laptop_can_ask_what_a_gpu_would_say_of_the_sizes():
    tracker = PrecisionTracker()
    for head_dim in (64, 256):
        half = qkv(torch.float16, (1, 8, 2, head_dim))
        assert tracker.track_flash_attention_input(*half, device="cuda") == []
    half = qkv(torch.float16, (1, 8, 2, 512))
    (found,) = tracker.track_flash_attention_input(*half, device="cuda")
    assert found.kind == "no flash kernel"
    for name in ("fa2", "fa4", "sdpa_flash", "sdpa_cudnn"):
        assert f"{name} takes head_dim up to 256, not 512" in found.message
    assert "sdpa_efficient" in found.remedy
    # One kernel is enough: multiples of 8 are asked for by some, not by flash-attn 2.
    odd = qkv(torch.float16, (1, 8, 2, 60))
    assert tracker.track_flash_attention_input(*odd, device="cuda") == []


# --- nothing is changed ---------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "ranges"), [(gpt2, True), (llama, False)])
def test_outputs_and_gradients_are_bitwise_the_same(build, ranges):
    plain, watched = build(), build()
    loss = plain(IDS, labels=IDS).loss
    loss.backward()
    with PrecisionTracker(watched, ranges=ranges) as tracker:
        watched_loss = watched(IDS, labels=IDS).loss
        watched_loss.backward()
    assert torch.equal(loss, watched_loss)
    expected, got = gradients(plain), gradients(watched)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert tracker.violations == []
    assert "All is well" in tracker.report()


def test_in_place_operations_and_repeated_calls_work():
    plain, watched = Mlp(), Mlp()
    x = torch.randn(4, 8)
    plain(x).sum().backward()
    with PrecisionTracker(watched) as tracker:
        watched(x).sum().backward()
    assert all(torch.equal(gradients(plain)[n], g) for n, g in gradients(watched).items())
    called = rows(tracker)
    assert list(called[called["name"] == "up"]["call"]) == [0, 1]
    back = rows(tracker, "backward")
    assert list(back["name"]) == ["up", "act", "up", "norm"]
    assert list(back[back["name"] == "up"]["call"]) == [1, 0]


def test_every_hook_is_gone_afterwards():
    model = gpt2()
    assert hooks(model) == 0
    with PrecisionTracker(model):
        assert hooks(model) > 0
        model(IDS)
    assert hooks(model) == 0
    before = len(torch.overrides._get_current_function_mode_stack())
    tracker = PrecisionTracker(model)
    with pytest.raises(RuntimeError, match="my own"), tracker:
        model(IDS)
        raise RuntimeError("my own")
    assert hooks(model) == 0
    assert len(torch.overrides._get_current_function_mode_stack()) == before
    assert len(rows(tracker)) > 0


def test_a_backward_pass_after_the_block_is_not_recorded():
    model = gpt2()
    with PrecisionTracker(model) as tracker:
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert set(tracker.to_dataframe()["pass"]) == {"forward"}


def test_activations_are_not_kept_alive():
    kept = []

    class Spy(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            kept.append(weakref.ref(out))
            return out

    model = nn.Sequential(Spy(4, 4), nn.Sigmoid())
    with PrecisionTracker(model):
        model(torch.ones(1, 4))
        gc.collect()
        assert [ref() for ref in kept] == [None]


# --- what is recorded -----------------------------------------------------------------------------


def test_the_frame_has_the_documented_columns_and_counts_what_a_tensor_holds():
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU()).half()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0, 0], [-3.0, 0], [2e-6, 0], [0.0, 0]]))
    with PrecisionTracker(model) as tracker:
        model(torch.tensor([[1.0, 4.0]], dtype=torch.float16)).sum().backward()
    frame = tracker.to_dataframe()
    documented = PrecisionTracker.to_dataframe.__doc__
    assert all(f"{name}," in documented or f"{name}:" in documented for name in frame)
    linear = only(tracker, "0")
    assert (linear["dtype_in"], linear["dtype_weights"], linear["dtype_out"]) == ("float16",) * 3
    assert (linear["largest"], linear["largest_in"]) == (3.0, 4.0)
    assert linear["smallest"] == pytest.approx(2e-6, rel=0.02)
    assert (linear["subnormal"], linear["zero"], linear["entries"]) == (1, 1, 4)
    (gradient,) = rows(tracker, "weight gradient").to_dict("records")
    assert (gradient["name"], gradient["largest"]) == ("0.weight", 4.0)


def test_infinities_are_counted_by_sign_and_nearly_lost_entries_apart():
    held = range_of(torch.tensor([math.inf, -math.inf, -math.inf, math.nan, 0.0, 1.0]).half())
    assert (held.inf, held.minus_inf, held.nan, held.zero) == (3, 2, 1, 1)
    assert held.nonfinite == "1 NaN and 1 +inf and 2 -inf of 6 entries"
    step = 2.0**-24  # float16's smallest subnormal
    held = range_of(torch.tensor([step, -7 * step, 8 * step, 1023 * step, 1024 * step]).half())
    assert (held.bottom, held.subnormal) == (2, 4)


def test_every_attention_call_is_recorded_under_its_module():
    model = llama().bfloat16()
    with PrecisionTracker(model) as tracker:
        step(model)
    calls = rows(tracker)[rows(tracker)["kind"] == "attention call"]
    assert list(calls["name"]) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert set(calls["class"]) == {"F.scaled_dot_product_attention"}
    assert set(calls["dtype_in"]) == {"bfloat16"}
    back = rows(tracker, "backward")
    assert list(back[back["kind"] == "attention call"]["name"]) == list(calls["name"])[::-1]


def test_the_front_door_is_one_call_and_says_which_backend_ran():
    q, k, v = qkv(torch.float32)
    with PrecisionTracker() as tracker:
        attention(q, k, v, backend="sdpa_flash")
        attention(q=q, k=k, v=v, backend="standard", return_lse=True)
    frame = tracker.to_dataframe()
    assert list(frame["class"]) == ["attention", "attention"]
    assert list(frame["backend"]) == ["sdpa_flash", "standard"]
    assert "flash" in frame["kernel"][0]
    assert list(frame["entries"]) == [q.numel()] * 2  # not the log-sum-exp


def test_multi_head_attention_of_pytorch_is_an_attention_call():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    mask = torch.full((4, 4), -math.inf).triu(1)
    with PrecisionTracker(layer) as tracker:
        layer(x, x, x, attn_mask=mask, need_weights=False)
    assert list(rows(tracker)["kind"]) == ["block", "attention call"]
    assert tracker.violations == []  # a mask's -inf is no alarm


def test_autocast_shows_as_implicit_casts():
    model = gpt2()
    with PrecisionTracker(model) as tracker, torch.autocast("cpu", torch.bfloat16):
        model(IDS)
    assert only(tracker, "transformer.h.0.attn.c_attn")["cast"] == (
        "float32 -> bfloat16; weights float32 -> bfloat16"
    )
    assert only(tracker, "transformer.h.0.mlp.c_proj")["cast"] == "weights float32 -> bfloat16"
    assert only(tracker, "transformer.h.0.ln_1")["cast"] == ""
    casts = int((rows(tracker)["cast"] != "").sum())
    assert f"{casts:4} implicit casts" in tracker.report()
    assert tracker.violations == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_records_the_forward_pass_once_and_all_gradients(reentrant):
    model, plain = Mlp(), Mlp()
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    (checkpoint(plain, x, use_reentrant=reentrant) * y).sum().backward()
    with PrecisionTracker(model) as tracker:
        (checkpoint(model, x, use_reentrant=reentrant) * y).sum().backward()
    assert list(rows(tracker)["name"]) == ["(model)", "norm", "up", "act", "up"]
    assert list(rows(tracker, "backward")["name"]) == ["up", "act", "up", "norm"]
    assert all(torch.equal(gradients(plain)[n], g) for n, g in gradients(model).items())
    with tracker:
        model(x)  # the stack of open calls is still right
    assert list(rows(tracker)["name"]) == ["(model)", "norm", "up", "act", "up"]


def test_sparse_gradients_are_measured():
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with PrecisionTracker(model) as tracker:
        model(torch.tensor([1, 1])).sum().backward()
    (gradient,) = rows(tracker, "weight gradient").to_dict("records")
    assert (gradient["largest"], gradient["entries"]) == (2.0, 2)


def test_only_the_chosen_modules_are_watched():
    chosen = PrecisionTracker(gpt2(), modules=(nn.LayerNorm,))
    with chosen:
        chosen.model(IDS)
    frame = rows(chosen)
    assert set(frame[frame["kind"] == "module"]["class"]) == {"LayerNorm"}
    assert (frame["kind"] == "attention call").sum() == 3


def test_without_ranges_only_dtypes_are_there_and_the_report_says_so():
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = math.nan
    with PrecisionTracker(model, ranges=False) as tracker:
        step(model)
    frame = tracker.to_dataframe()
    assert frame["largest"].isna().all()
    assert set(frame["pass"]) == {"forward", "backward", "weight gradient"}
    assert "ranges were not recorded" in tracker.report()


def test_nothing_recorded_is_said():
    assert "Nothing was recorded" in PrecisionTracker(gpt2()).report()
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        PrecisionTracker(torch.ones(1))


# --- the first layer where things went wrong ------------------------------------------------------


def test_planted_nan_weights_are_named_exactly():
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = math.nan
    with PrecisionTracker(model) as tracker:
        step(model)
    (found,) = tracker.violations  # what only passes the NaN on is not accused
    assert (found.kind, found.where) == ("NaN", "transformer.h.1.attn.c_attn")
    assert "its input was finite" in found.message
    assert "its weights hold 1 NaN of 816 entries" in found.message
    assert "First: NaN at transformer.h.1.attn.c_attn" in tracker.report()


def test_float16_overflow_in_an_mlp_names_the_layer_and_the_cause():
    model = llama().half()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(6e4)
    with PrecisionTracker(model) as tracker:
        model(IDS)
    found = tracker.violations[0]
    assert (found.kind, found.where) == ("overflow", "model.layers.1.mlp.up_proj")
    assert "its weights are finite (largest 6e+04)" in found.message
    assert "bfloat16" in found.remedy
    with PrecisionTracker(model.bfloat16()) as tracker:
        model(IDS)
    assert tracker.violations == []


def test_an_overflow_between_two_modules_names_both():
    model = llama().half()  # act_fn(gate) * up is computed by no module
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(5e3)
        model.model.layers[0].mlp.gate_proj.weight.fill_(5e3)
    with PrecisionTracker(model) as tracker:
        model(IDS)
    found = tracker.violations[0]
    assert (found.kind, found.where) == ("overflow", "model.layers.0.mlp.down_proj")
    assert "the output of model.layers.0.mlp.up_proj before it was finite" in found.message


def test_bad_data_is_not_blamed_on_a_layer():
    model = Mlp()
    with PrecisionTracker(model) as tracker:
        model(torch.full((1, 8), math.nan))
    (found,) = tracker.violations
    assert found.where == "(model)"
    assert "from outside" in found.message


def llama_with_float32_rotary(monkeypatch):
    """The trap: q and k pass through rotary embeddings in float32, v stays behind.

    Call it with use_cache=False: the cache joins v to an empty tensor of k's dtype, which makes v
    float32 too.
    """
    from transformers.models.llama import modeling_llama

    model = llama().bfloat16()
    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama,
        "apply_rotary_pos_emb",
        lambda q, k, *rest: rotate(q.float(), k.float(), *rest),
    )
    return model


def test_rotary_embeddings_in_float32_are_found_at_the_attention_call(monkeypatch):
    tracker = PrecisionTracker(llama_with_float32_rotary(monkeypatch))
    with pytest.raises(RuntimeError), tracker:
        tracker.model(IDS, use_cache=False)
    (found,) = tracker.violations
    assert found.kind == "mixed dtypes"
    assert found.where.startswith("attention call of model.layers.0.self_attn")
    assert found.message.startswith("q, k float32, v bfloat16")
    assert hooks(tracker.model) == 0


def test_autocast_hides_the_same_trap_and_the_tracker_does_not(monkeypatch):
    tracker = PrecisionTracker(llama_with_float32_rotary(monkeypatch))
    with tracker, torch.autocast("cpu", torch.bfloat16):
        tracker.model(IDS, use_cache=False)
    assert kinds(tracker.violations) == ["mixed dtypes"] * 2
    call = only(tracker, "model.layers.1.self_attn", "F.scaled_dot_product_attention")
    assert call["cast"] == "q, k float32, v bfloat16 -> bfloat16"


def test_a_layer_that_refuses_its_input_is_named_with_the_error():
    model = gpt2()
    model.transformer.h[2].mlp.c_proj.bfloat16()
    tracker = PrecisionTracker(model)
    with pytest.raises(RuntimeError), tracker:
        model(IDS)
    (found,) = tracker.violations
    assert (found.kind, found.where) == ("mixed dtypes", "transformer.h.2.mlp.c_proj")
    assert "input float32, weights bfloat16" in found.message
    assert "RuntimeError" in found.message
    with tracker:
        model.transformer.h[0].ln_1(torch.ones(1, 16))
    assert tracker.violations == []


def scaled_step(build, scale):
    """One step in float16 with the loss scaled by `scale`."""
    model = build(vocab_size=1000).half()
    ids = torch.randint(1000, (2, 32))
    with PrecisionTracker(model) as tracker:
        (model(ids, labels=ids).loss.float() * scale).backward()
    return tracker


def test_small_float16_gradients_underflow_and_scaling_the_loss_fixes_it():
    found = scaled_step(llama, 2**-12).violations
    assert set(kinds(found)) == {"underflow"}
    # 62 tokens, 1000 words: 1 / 62 / 2^12 = 3.9e-6 is left, a thousandth of it is not.
    assert found[0].where == "the gradient of the output of lm_head"
    assert found[0].message.startswith("99.9% of its entries are 0")
    assert found[0].message.endswith("the largest is 3.9e-06")
    assert "Scale the loss" in found[0].remedy
    assert scaled_step(llama, 2**12).violations == []


def float16_units(*counts):
    """The range of a float16 tensor: pairs of (how many, times the smallest subnormal)."""
    values = [2.0**-24 * units for count, units in counts for _ in range(count)]
    return range_of(torch.tensor(values).half())


def test_the_rule_of_underflow_at_its_edges():
    assert underflowed(float16_units((1, 7), (9, 1023)))  # a tenth has 3 bits left
    assert not underflowed(float16_units((1, 7), (10, 1023)))
    assert not underflowed(float16_units((1, 8), (9, 1023)))
    assert not underflowed(float16_units((9, 1), (1, 1024)))  # the largest is normal
    assert underflowed(float16_units((5, 0), (5, 127)))
    assert not underflowed(float16_units((4, 0), (5, 127)))
    assert not underflowed(float16_units((9, 0), (1, 128)))  # ReLU may have made these zeros
    assert underflowed(float16_units((3, 0)), alive=True)
    assert not underflowed(float16_units((3, 0)), alive=False)


def test_the_gradient_of_the_keys_bias_is_rounding_noise_and_no_underflow():
    tracker = scaled_step(gpt2, 2**12)
    name = "transformer.h.0.attn.c_attn.bias"  # queries', keys' and values' biases
    bias = rows(tracker, "weight gradient").query(f"name == '{name}'").iloc[0]
    assert bias["subnormal"] > 0.1 * bias["entries"]
    assert tracker.violations == []


def test_a_gradient_that_vanished_altogether_is_an_underflow():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)).half()
    with torch.no_grad():
        model[1].weight.fill_(1e-5)
    with PrecisionTracker(model) as tracker:
        (model(torch.ones(1, 4, dtype=torch.float16)).sum() * 1e-4).backward()
    found = [v for v in tracker.violations if v.where == "the gradient of the output of 0"]
    assert kinds(found) == ["underflow"]
    assert "all of its entries are zero in float16" in found[0].message


def test_a_gradient_that_overflows_is_named_in_the_order_of_the_backward_pass():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)).half()
    with torch.no_grad():
        model[1].weight.fill_(100.0)
    with PrecisionTracker(model) as tracker:
        model(torch.zeros(1, 4, dtype=torch.float16)).sum().mul(6e4).backward()
    found = tracker.violations[0]
    assert (found.kind, found.where) == ("overflow", "the gradient of the output of 0")
    assert "loss scale" in found.remedy


def test_a_range_used_up_at_both_ends_is_not_mended_by_a_larger_scale():
    small, large = (nn.Linear(4, 4, bias=False).half() for _ in range(2))
    model = nn.ModuleDict({"small": small, "large": large})
    with torch.no_grad():
        large.weight.fill_(100.0)
    x = torch.zeros(1, 4, dtype=torch.float16)
    with PrecisionTracker(model) as tracker:
        tiny = small(x)
        huge = large(nn.Parameter(x))
        (tiny.float().sum() * 1e-7 + huge.float().sum() * 1e-7).backward()
    assert set(kinds(tracker.violations)) == {"underflow"}
    assert "Scale the loss" in tracker.violations[0].remedy
    model["first"] = nn.Linear(4, 4).half()  # the gradient of its output is 4 * 100 * 6e4
    with PrecisionTracker(model) as tracker:
        small(x).float().sum().mul(1e-7).backward()
        large(model["first"](x)).float().sum().mul(6e4).backward()
    found = tracker.violations
    assert kinds(found)[0] == "overflow"
    assert set(kinds(found)[1:]) == {"underflow"}
    for violation in found[1:]:
        assert "used up at both ends" in violation.remedy
        assert "2^" not in violation.remedy


def test_a_nan_gradient_of_another_dtype_comes_first_and_is_to_be_mended_first():
    model = nn.Linear(4, 4).half()
    with PrecisionTracker(nn.Sequential(nn.Linear(4, 4), model)) as tracker:
        out = tracker.model[0](torch.zeros(1, 4)).mul(0).norm()  # the root's slope at 0
        out = out.sqrt() + model(torch.ones(1, 4).half()).float().sum() * 1e-7
        out.backward()
    found = tracker.violations
    assert kinds(found)[:2] == ["NaN", "underflow"]
    assert found[1].remedy == "Fix first what is not finite"


# --- -inf -----------------------------------------------------------------------------------------


class Textbook(nn.Module):
    """Attention whose scores are masked with -inf before a softmax that is a module."""

    def __init__(self, softmax, hidden):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.softmax, self.hidden = nn.Linear(4, 4), softmax, hidden

    def forward(self, x):
        scores = (self.q(x) @ x.mT).masked_fill(self.hidden, -math.inf)
        return self.softmax(scores)


@pytest.mark.parametrize("softmax", [nn.Softmax(-1), nn.LogSoftmax(-1)])
def test_scores_masked_with_minus_infinity_are_no_alarm(softmax):
    model = Textbook(softmax, torch.ones(3, 3).triu(1).bool())
    with PrecisionTracker(model) as tracker:
        model(torch.randn(2, 3, 4)).tril().square().mean().backward()
    assert tracker.violations == []
    assert only(tracker, "softmax")["nonfinite_in"] == 6


def test_a_row_of_nothing_but_minus_infinity_is_named_at_the_softmax():
    model = Textbook(nn.Softmax(-1), torch.ones(3, 3, dtype=torch.bool))
    with PrecisionTracker(model) as tracker:
        model(torch.randn(2, 3, 4))
    (found,) = tracker.violations
    assert (found.kind, found.where) == ("NaN", "softmax")
    assert "holds 18 NaN of 18 entries; its input holds 18 -inf of 18 entries" in found.message
    assert "sees no key" in found.remedy


def test_minus_infinity_of_a_logarithm_is_named_where_it_becomes_nan():
    class Log(nn.Module):
        def forward(self, x):
            return x.log()

    with PrecisionTracker(nn.Sequential(Log(), nn.Linear(3, 3))) as tracker:
        tracker.model(torch.zeros(2, 3))
    (found,) = tracker.violations
    assert found.where == "1"
    assert "its input holds 6 -inf of 6 entries" in found.message
    assert "logarithm of 0" in found.remedy


def test_a_layer_that_overflows_to_minus_infinity_is_guilty_even_before_a_softmax():
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Softmax(-1)).half()
    with torch.no_grad():
        model[0].weight[0].fill_(-6e4)
    with PrecisionTracker(model) as tracker:
        model(torch.ones(1, 4, dtype=torch.float16))
    found = tracker.violations[0]
    assert (found.kind, found.where) == ("overflow", "0")
    assert "bfloat16" in found.remedy
