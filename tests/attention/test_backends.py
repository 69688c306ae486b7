import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from labsupport.attention import (
    AttentionInputError,
    BackendUnavailableError,
    attention,
    attention_varlen,
    available_backends,
    backends,
    compare_with_oracle,
    flash_attention,
    last_call,
    oracle_attention,
)
from labsupport.attention.backends import BACKENDS
from labsupport.attention.backends import _choose as choose
from labsupport.attention.implementations import by_name, shape_comes_back
from labsupport.attention.reference import masked_attention
from labsupport.attention.registry import AttentionCall
from labsupport.precision.cast_hooks import KernelDtype
from tests.attention.cases import (
    DEVICES,
    assert_obeys_error_rule,
    make_model_qkv,
    to_math_layout,
)

NAMES = [entry.name for entry in BACKENDS]
# FlexAttention compiles for many seconds per shape; its cases are in test_flex.py.
RUNNABLE = [
    (device, status.name)
    for device in DEVICES
    for status in available_backends(device=device)
    if status.runs and status.name != "flex"
]
on_every_backend = pytest.mark.parametrize(("device", "name"), RUNNABLE)

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 4)},
    "causal window": {"causal": True, "window_size": (9, -1)},
    "scale": {"softmax_scale": 0.5, "causal": True},
    "alibi": {"causal": True, "alibi": True},
}
SHAPES = {  # batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim
    "square": (2, 64, 64, 4, 4, 32),
    "grouped": (2, 61, 61, 6, 2, 40),
    "more keys": (1, 33, 71, 4, 1, 64),
    "more queries": (1, 71, 33, 2, 2, 16),
    "one query": (2, 1, 50, 4, 2, 32),
}


def unpack(options, heads, device):
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.linspace(0.1, 0.6, heads, device=device)
    return options


def skip_unless_it_runs(name, inputs, **options):
    status = available_backends(*inputs, **options)[name]
    if not status.runs:
        assert status.reasons
        pytest.skip("; ".join(status.reasons))


# Each option twice, with two shapes and dtypes: on a GPU all of it runs.
CASES = [
    pytest.param(shape, options, dtype, id=f"{n}, {o}, {dtype}")
    for i, (o, options) in enumerate(OPTIONS.items())
    for j, (n, shape) in enumerate(SHAPES.items())
    for d, dtype in enumerate([torch.float32, torch.bfloat16])
    if "cuda" in DEVICES or (i + j + 3 * d) % 5 == 0
]


@on_every_backend
@pytest.mark.parametrize(("shape", "options", "dtype"), CASES)
def test_every_backend_that_says_it_runs_obeys_the_error_rule(name, shape, options, dtype, device):
    inputs = make_model_qkv(*shape, dtype=dtype, device=device)
    options = unpack(options, shape[3], device)
    skip_unless_it_runs(name, inputs, **options)

    def run(q, k, v):
        return attention(q, k, v, backend=name, **options)

    assert_obeys_error_rule(
        run, inputs, math_layout=to_math_layout, back=lambda t: t.transpose(1, 2), **options
    )
    assert last_call().backend == name


@on_every_backend
@pytest.mark.parametrize(("shape", "options", "dtype"), CASES)
def test_log_sum_exps_follow_one_convention(name, shape, options, dtype, device):
    dtype = torch.float32 if device == "cpu" else dtype
    inputs = [t.detach() for t in make_model_qkv(*shape, dtype=dtype, device=device)]
    options = unpack(options, shape[3], device)
    skip_unless_it_runs(name, inputs, return_lse=True, **options)
    _, lse = attention(*inputs, backend=name, return_lse=True, **options)
    _, expected = oracle_attention(*to_math_layout(*inputs), **options)
    _, textbook = masked_attention(*to_math_layout(*inputs), **options, return_lse=True)
    assert lse.dtype == torch.float32
    assert lse.shape == expected.shape
    empty = expected == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    report = compare_with_oracle(lse[~empty], textbook[~empty], expected[~empty])
    assert report.ok, report


# --- packed sequences -----------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = [5, 0, 17, 3, 8], [5, 4, 20, 0, 2]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@on_every_backend
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window_size": (3, -1)}]
)
def test_packed_sequences_never_see_each_other(name, options, device):
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, _, _ = make_model_qkv(1, sum(LENGTHS_Q), 1, 4, 4, 16, dtype=dtype, device=device)
    _, k, v = make_model_qkv(1, 1, sum(LENGTHS_K), 2, 2, 16, dtype=dtype, device=device)
    q, k, v = (t[0].detach() for t in (q, k, v))
    packed = {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_k": offsets(LENGTHS_K)}
    skip_unless_it_runs(name, (q, k, v), **packed, **options)
    out = attention_varlen(q, k, v, **packed, **options, backend=name)

    for n_q, n_k, start_q, start_k in zip(
        LENGTHS_Q, LENGTHS_K, packed["cu_seqlens_q"], packed["cu_seqlens_k"], strict=False
    ):
        rows, cols = slice(start_q, start_q + n_q), slice(start_k, start_k + n_k)
        if n_q and n_k:
            alone = attention(
                *(t.unsqueeze(0) for t in (q[rows], k[cols], v[cols])),
                backend="standard",
                **options,
            )[0]
            torch.testing.assert_close(out[rows], alone, atol=2e-3, rtol=2e-3)
        else:
            assert (out[rows] == 0).all()


@pytest.mark.parametrize("name", ["flash_torch", "sdpa_flash", "standard"])
def test_packed_log_sum_exps_are_heads_by_tokens(name):
    lengths = [4, 9]
    q, k, v = (t[0].detach() for t in make_model_qkv(1, 13, 13, 4, 2, 16))
    _, lse = attention_varlen(
        q, k, v, offsets(lengths), offsets(lengths), causal=True, backend=name, return_lse=True
    )
    first = oracle_attention(*to_math_layout(*(t[None, :4] for t in (q, k, v))), causal=True)[1][0]
    assert lse.shape == (4, 13)
    torch.testing.assert_close(lse[:, :4].double(), first, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["flash_torch", "sdpa_flash"])
def test_gradients_of_packed_sequences_stay_inside_each_sequence(name):
    q, k, v = (t[0].detach().requires_grad_() for t in make_model_qkv(1, 10, 10, 2, 2, 8))
    out = attention_varlen(q, k, v, offsets([4, 6]), offsets([4, 6]), backend=name)
    out[:4].sum().backward()
    assert (k.grad[4:] == 0).all()
    assert (v.grad[:4] != 0).any()


# --- who runs, who ran, and why not ---------------------------------------------------------------


@pytest.mark.parametrize(("device", "name"), [pair for pair in RUNNABLE if "sdpa" in pair[1]])
@pytest.mark.parametrize("shape", [SHAPES["square"], SHAPES["more keys"]])
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_kernel_named_is_the_kernel_that_the_profiler_sees(name, shape, return_lse, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = make_model_qkv(*shape, dtype=dtype, device=device)
    skip_unless_it_runs(name, inputs, causal=True, return_lse=return_lse)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        attention(*inputs, causal=True, backend=name, return_lse=return_lse)
    seen = {event.key for event in trace.key_averages()}
    named = last_call().kernel.split(" ")[0]
    # Bottom-right masks go to the kernels of SDPA's memory-efficient path one operator lower.
    lower = named.replace("_scaled_dot_product_efficient_attention", "_efficient_attention_forward")
    assert named in seen or lower in seen


def test_a_refusal_lists_every_reason_at_once():
    inputs = make_model_qkv(1, 8, 8, 4, 2, 300)
    with pytest.raises(BackendUnavailableError) as caught:
        attention(*inputs, backend="xformers", alibi_slopes=torch.ones(4), window_size=(2, 2))
    if not torch.cuda.is_available():
        assert "not installed" in str(caught.value)
        assert "runs on cuda, not on cpu" in str(caught.value)
    for option in ("multiple of 8", "windows", "alibi", "grouped"):
        assert option in str(caught.value)
    assert "flash_torch" in str(caught.value)
    assert len(caught.value.reasons["xformers"]) >= 4


def test_limits_and_the_kernels_own_reasons_are_listed_together():
    q, k, v = (t.detach().mT.contiguous().mT for t in make_model_qkv(1, 8, 8, 2, 2, 16))
    reasons = available_backends(q, k, v, alibi_slopes=torch.ones(2))["sdpa_flash"].reasons
    assert any("alibi" in reason for reason in reasons)
    assert any("contiguous" in reason for reason in reasons)
    assert len(set(reasons)) == len(reasons)
    attention(q, k, v)
    assert last_call().backend == "flash_torch"


def test_auto_prefers_pytorchs_flash_kernel_on_a_cpu():
    attention(*make_model_qkv(1, 8, 8, 2, 2, 16))
    report = last_call()
    assert report.backend == "sdpa_flash"
    assert report.requested == "auto"
    assert "fa2" in report.refused


def test_auto_goes_on_to_the_next_backend_that_takes_the_options():
    attention(*make_model_qkv(1, 8, 8, 2, 2, 16), alibi_slopes=torch.ones(2))
    assert last_call().backend == "flash_torch"
    assert any("alibi" in reason for reason in last_call().refused["sdpa_flash"])


@pytest.mark.parametrize("name", ["standard", "sdpa_math"])
def test_flash_attention_never_falls_back_to_the_textbook(name):
    with pytest.raises(BackendUnavailableError, match="not FlashAttention"):
        flash_attention(*make_model_qkv(1, 8, 8, 2, 2, 16), backend=name)


def test_each_thread_has_its_own_last_call():
    attention(*make_model_qkv(1, 8, 8, 2, 2, 16), backend="standard")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(last_call()))
    thread.start()
    thread.join()
    assert seen == [None]
    assert last_call().backend == "standard"


def test_the_table_of_backends_prints_and_renders():
    table = available_backends(device="cpu")
    assert [status.name for status in table] == NAMES
    assert table["standard"].runs
    assert "runs on cuda, not on cpu" in str(table)
    assert "<table>" in table._repr_html_()
    with pytest.raises(AttentionInputError):
        table["nonsense"]


# --- what must not happen silently ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["sdpa_flash", "flash_torch", "standard", "sdpa_math"])
def test_autocast_changes_neither_dtype_nor_precision(name):
    q, k, v = make_model_qkv(1, 32, 32, 2, 2, 16)
    expected = oracle_attention(*to_math_layout(q, k, v))[0].transpose(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, backend=name)
        out.sum().backward()
    assert out.dtype == q.grad.dtype == torch.float32
    assert (out - expected).abs().max() < 1e-5


def test_packed_auto_chooses_a_backend_that_takes_every_document():
    q, k, v = (t[0].detach().mT.contiguous().mT for t in make_model_qkv(1, 10, 10, 2, 2, 8))
    attention_varlen(q, k, v, offsets([4, 6]), offsets([4, 6]))
    assert last_call().backend == "flash_torch"
    status = available_backends(
        q, k, v, cu_seqlens_q=offsets([4, 6]), cu_seqlens_k=offsets([4, 6])
    )["sdpa_flash"]
    assert "contiguous" in status.reasons[0]


def test_packed_auto_prefers_one_kernel_for_all_sequences_to_a_loop_over_them():
    q, k, v = (t[0].detach() for t in make_model_qkv(1, 10, 10, 2, 2, 8))
    loop = by_name("sdpa_flash")
    at_once = replace(
        by_name("flash_torch"), name="at once", run_packed=lambda call: (call.q, None)
    )
    packed = AttentionCall(q, k, v, cu_seqlens_q=offsets([4, 6]), cu_seqlens_k=offsets([4, 6]))
    batched = AttentionCall(q[None], k[None], v[None])
    assert choose(packed, "auto", (loop, at_once))[0].name == "at once"
    assert choose(packed, "sdpa_flash", (loop, at_once))[0].name == "sdpa_flash"
    assert choose(batched, "auto", (loop, at_once))[0].name == "sdpa_flash"


def test_auto_does_not_store_a_large_mask_unasked():
    inputs = [t.detach() for t in make_model_qkv(1, 1100, 1100, 1, 1, 8)]
    attention(*inputs, causal=True, window_size=(16, -1))
    assert last_call().backend == "flash_torch"
    assert last_call().io_aware
    attention(*inputs, causal=True, window_size=(16, -1), backend="sdpa_flash")
    assert not last_call().io_aware
    assert "stored" in last_call().kernel


def test_a_stored_mask_is_named_for_packed_sequences_too():
    q, k, v = (t[0].detach() for t in make_model_qkv(1, 10, 10, 2, 2, 8))
    packed = offsets([4, 6]), offsets([4, 6])
    attention_varlen(q, k, v, *packed, window_size=(1, 1), backend="sdpa_flash")
    assert "stored" in last_call().kernel
    assert "once per sequence" in last_call().kernel


def test_a_refused_call_leaves_no_report_of_an_older_one():
    inputs = make_model_qkv(1, 8, 8, 2, 2, 16)
    attention(*inputs)
    with pytest.raises(BackendUnavailableError):
        attention(*inputs, backend="xformers")
    assert last_call() is None


def test_queries_without_keys_do_not_make_a_call_look_quadratic():
    attention(*make_model_qkv(1, 9, 4, 2, 2, 16), causal=True, backend="sdpa_flash")
    assert last_call().io_aware


# --- one plan for each signature ------------------------------------------------------------------


def signatures():
    q, k, v = (t.detach() for t in make_model_qkv(1, 9, 12, 4, 2, 16))
    slopes = torch.linspace(0.1, 0.4, 4)
    yield (q, k, v), {}
    yield (q.double(), k.double(), v.double()), {}
    yield (q[:, :5], k, v), {}
    yield (q, k[:, :8], v[:, :8]), {"causal": True}
    yield (q.mT.contiguous().mT, k.mT.contiguous().mT, v.mT.contiguous().mT), {}
    for options in (
        {"causal": True},
        {"causal": True, "window_size": (3, -1)},
        {"window_size": [3, 2]},
        {"softmax_scale": 0.3},
        {"alibi_slopes": slopes},
        {"alibi_slopes": slopes.expand(1, -1) * 2},
        {"backend": "standard"},
        {"return_lse": True},
    ):
        yield (q, k, v), options
    yield tuple(t.clone().requires_grad_() for t in (q, k, v)), {}


def test_a_call_like_an_earlier_one_gives_the_same_as_a_fresh_plan(monkeypatch):
    monkeypatch.setattr(backends, "_plans", {})
    calls = list(signatures())
    fresh = []
    for inputs, options in calls:
        backends._plans.clear()
        fresh.append((attention(*inputs, **options), last_call()))
    for _ in range(2):
        for (inputs, options), (right, report) in zip(calls, fresh, strict=True):
            got = attention(*inputs, **options)
            torch.testing.assert_close(got, right, rtol=0, atol=0)
            assert last_call() == report
    assert len(backends._plans) == len(calls) - 1  # a list for a window is planned each time


def test_a_plan_looks_at_the_values_of_this_call_and_at_gradients():
    q, k, v = (t.detach() for t in make_model_qkv(1, 9, 4, 2, 2, 16))
    for scale in (1.0, 2.0):
        out = attention(q * scale, k, v, causal=True)
        exact = oracle_attention(*to_math_layout(q * scale, k, v), causal=True)[0].transpose(1, 2)
        assert (out - exact).abs().max() < 1e-5
    leaf = q.clone().requires_grad_()
    assert attention(leaf, k, v, causal=True).requires_grad
    with torch.no_grad():
        assert not attention(leaf, k, v, causal=True).requires_grad


def test_old_plans_make_room(monkeypatch):
    monkeypatch.setattr(backends, "_plans", {})
    monkeypatch.setattr(backends, "_MOST_PLANS", 2)
    q = torch.zeros(1, 8, 1, 8)
    for n in range(1, 6):
        attention(q, q[:, :n], q[:, :n])
        assert 1 <= len(backends._plans) <= 2


# --- inside torch.compile -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, torch.bfloat16], ids=["plain", "under a policy"])
@pytest.mark.parametrize(
    ("front_door", "options"),
    [
        (attention, {"backend": "sdpa_flash", "window_size": (3, 3), "return_lse": True}),
        (attention, {"backend": "sdpa_math"}),
        (attention, {"backend": "auto", "causal": True}),
        (attention, {"backend": "auto", "alibi_slopes": torch.ones(4)}),
        (flash_attention, {"return_lse": True}),
    ],
)
def test_the_front_door_compiles_to_the_same_results_and_reports(front_door, options, policy):
    torch.compiler.reset()
    compiled = torch.compile(front_door, backend="eager")
    results, reports = [], []
    for function in (compiled, front_door):
        inputs = [t.detach().requires_grad_() for t in make_model_qkv(1, 16, 24, 4, 2, 8)]
        with nullcontext() if policy is None else KernelDtype(policy):
            given = function(*inputs, **options)
        reports.append(last_call())
        outs = given if isinstance(given, tuple) else (given,)
        results.append([*outs, *torch.autograd.grad(outs[0].sum(), inputs)])
    for got, right in zip(*results, strict=True):
        assert torch.equal(got, right)
    assert reports[0] == reports[1]


def test_what_prepares_each_new_length_is_not_chosen_beside_a_growing_cache():
    def call(seqlen_q, seqlen_k):
        q, k = torch.zeros(1, seqlen_q, 2, 8), torch.zeros(1, seqlen_k, 2, 8)
        return AttentionCall(q, k, k, causal=True)

    assert shape_comes_back(call(64, 64))
    assert not shape_comes_back(call(1, 64))
    assert not shape_comes_back(call(16, 64))
    assert not by_name("flex").in_auto(call(64, 64))  # on a CPU never
