from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from labsupport.attention import (
    BackendUnavailableError,
    attention,
    attention_varlen,
    available_backends,
    backends,
    compare_with_oracle,
    flash_attention,
    flash_attention_forward,
    implementations,
    last_call,
    oracle_attention,
    register_backend,
)
from labsupport.attention.backends import BACKENDS
from labsupport.attention.backends import _choose as choose
from labsupport.attention.call import AttentionCall
from labsupport.attention.implementations import by_name, in_order, shape_comes_back
from labsupport.attention.preferences import LENGTHS, NAMES, ORDERS, fastest
from labsupport.attention.reference import masked_attention
from tests.attention.cases import (
    DEVICES,
    GPU,
    assert_obeys_error_rule,
    make_model_qkv,
    to_math_layout,
)

# FlexAttention compiles for many seconds per shape, and the lab's Triton kernels are interpreted on
# a CPU: they have tests of their own.
RUNNABLE = [
    (device, status.name)
    for device in DEVICES
    for status in available_backends(device=device)
    if status.runs and (device, status.name) != ("cpu", "flash_triton") and status.name != "flex"
]
on_every_backend = pytest.mark.parametrize(("device", "name"), RUNNABLE)

SHAPES = {  # batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim
    "square": (2, 64, 64, 4, 4, 32),
    "grouped": (2, 61, 61, 6, 2, 40),
    "more keys": (1, 33, 71, 4, 1, 64),
    "more queries": (1, 71, 33, 2, 2, 16),
    "one query": (2, 1, 50, 4, 2, 32),
}
SLOPES = torch.linspace(0.1, 0.6, 4)
CASES = [
    ("grouped", {}),
    ("square", {"causal": True}),
    ("more keys", {"causal": True, "softmax_scale": 0.5}),
    ("more queries", {"causal": True}),
    ("more keys", {"window_size": (9, 4)}),
    ("grouped", {"causal": True, "window_size": (9, -1)}),
    ("more keys", {"causal": True, "alibi_slopes": SLOPES}),
    ("one query", {"alibi_slopes": torch.stack([SLOPES, SLOPES / 2])}),
    ("grouped", {"causal": True, "softcap": 2.0}),
    ("square", {"window_size": (9, 4), "softcap": 0.5}),
]
DTYPES = [torch.float32, torch.bfloat16]


def skip_unless_it_runs(name, inputs, **options):
    status = available_backends(*inputs, **options)[name]
    if not status.runs:
        assert status.reasons
        pytest.skip("; ".join(status.reasons))


@on_every_backend
@pytest.mark.parametrize(
    ("shape", "options", "dtype"),
    [
        pytest.param(*case, dtype, id=f"{case[0]}-{i}-{dtype}")
        for i, case in enumerate(CASES)
        for dtype in (DTYPES if GPU else [DTYPES[i % 2]])
    ],
)
def test_every_backend_that_says_it_runs_obeys_the_error_rule(name, shape, options, dtype, device):
    inputs = make_model_qkv(*SHAPES[shape], dtype=dtype, device=device)
    options = {k: v.to(device) if k == "alibi_slopes" else v for k, v in options.items()}
    skip_unless_it_runs(name, inputs, **options)
    assert_obeys_error_rule(
        lambda q, k, v: attention(q, k, v, backend=name, **options),
        inputs, math_layout=to_math_layout, back=lambda t: t.transpose(1, 2), **options,
    )  # fmt: skip
    assert last_call().backend == name

    inputs = [t.detach() for t in inputs]
    skip_unless_it_runs(name, inputs, return_lse=True, **options)
    _, lse = attention(*inputs, backend=name, return_lse=True, **options)
    _, expected = oracle_attention(*to_math_layout(*inputs), **options)
    _, textbook = masked_attention(*to_math_layout(*inputs), **options, return_lse=True)
    assert (lse.dtype, lse.shape) == (torch.float32, expected.shape)
    empty = expected == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    report = compare_with_oracle(lse[~empty], textbook[~empty], expected[~empty])
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "options"), [CASES[0], CASES[6], CASES[8]])
def test_compiled_flex_attention_is_right(shape, options, device):
    inputs = [t.detach() for t in make_model_qkv(*SHAPES[shape], device=device)]
    options = {k: v.to(device) if k == "alibi_slopes" else v for k, v in options.items()}
    skip_unless_it_runs("flex", inputs, **options)
    try:
        out = attention(*inputs, backend="flex", **options).transpose(1, 2)
    except BackendUnavailableError as error:  # PyTorch 2.11 cannot compile one of them on a GPU
        if device == "cpu":
            raise
        pytest.skip(error.reasons["flex"][0])
    oracle, _ = oracle_attention(*to_math_layout(*inputs), **options)
    assert (out - oracle).abs().max() < (1e-2 if device == "cuda" else 1e-5)


# --- packed sequences -----------------------------------------------------------------------------


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@on_every_backend
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window_size": (3, -1)}, {"causal": True, "softcap": 0.5}]
)
def test_packed_sequences_never_see_each_other(name, options, device):
    lengths_q, lengths_k = [5, 0, 17, 3, 8], [5, 4, 20, 0, 2]
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = make_model_qkv(
        1, sum(lengths_q), sum(lengths_k), 4, 2, 16, dtype=dtype, device=device
    )
    q, k, v = leaves = [t.detach()[0].requires_grad_() for t in (q, k, v)]
    packed = {"cu_seqlens_q": offsets(lengths_q), "cu_seqlens_k": offsets(lengths_k)}
    with_lse = options | {"return_lse": name != "sdpa_math"}
    skip_unless_it_runs(name, leaves, **packed, **with_lse)
    result = attention_varlen(*leaves, **packed, **with_lse, backend=name)

    outs, lses = [], []
    documents = q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)
    for rows, keys, values in zip(*documents, strict=True):
        out, lse = torch.zeros_like(rows)[None], rows.new_full((1, 4, len(rows)), -torch.inf)
        if len(rows) and len(keys):
            alone = [t[None] for t in (rows, keys, values)]
            out, lse = attention(*alone, backend="standard", return_lse=True, **options)
        outs.append(out[0])
        lses.append(lse[0])
    expected = torch.cat(outs)
    bound = {"atol": 1e-5, "rtol": 1e-5} if device == "cpu" else {"atol": 1e-2, "rtol": 1e-2}
    got = result[0] if with_lse["return_lse"] else result
    torch.testing.assert_close(got, expected, **bound)
    if with_lse["return_lse"]:
        torch.testing.assert_close(result[1], torch.cat(lses, -1).float(), **bound)
    for pair in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (got, expected)), strict=True):
        torch.testing.assert_close(*pair, **bound)


# --- who runs, who ran, and why not ---------------------------------------------------------------


@pytest.mark.parametrize(("device", "name"), [pair for pair in RUNNABLE if "sdpa" in pair[1]])
@pytest.mark.parametrize("shape", ["square", "more keys"])
def test_the_kernel_named_is_the_kernel_that_the_profiler_sees(name, shape, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = make_model_qkv(*SHAPES[shape], dtype=dtype, device=device)
    for return_lse in (False, True):
        skip_unless_it_runs(name, inputs, causal=True, return_lse=return_lse)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            attention(*inputs, causal=True, backend=name, return_lse=return_lse)
        seen = {event.key for event in trace.key_averages()}
        named = last_call().kernel.split(" ")[0]
        # Bottom-right masks go to the memory-efficient path's kernels one operator lower.
        lower = "_efficient_attention_forward"
        assert {named, named.replace("_scaled_dot_product_efficient_attention", lower)} & seen


def test_a_refusal_lists_every_reason_at_once():
    inputs = make_model_qkv(1, 8, 8, 4, 2, 300)
    with pytest.raises(BackendUnavailableError) as caught:
        attention(*inputs, backend="xformers", alibi_slopes=torch.ones(4), window_size=(2, 2))
    if not GPU:
        assert "not installed" in str(caught.value)
        assert "runs on cuda, not on cpu" in str(caught.value)
    for option in ("multiple of 8", "windows", "alibi", "grouped"):
        assert option in str(caught.value)
    assert "flash_torch" in str(caught.value)
    assert len(caught.value.reasons["xformers"]) >= 4
    assert last_call() is None  # no report of an older call
    assert "gradients on a CPU" in " ".join(available_backends(*inputs)["flex"].reasons)
    for name in ("standard", "sdpa_math"):  # flash_attention never falls back to the textbook
        with pytest.raises(BackendUnavailableError, match="not FlashAttention"):
            flash_attention(*inputs, backend=name)


def test_auto_goes_on_to_the_next_backend_that_takes_the_options_without_a_large_mask():
    inputs = make_model_qkv(1, 8, 8, 2, 2, 16)
    attention(*inputs)
    assert (last_call().backend, last_call().requested) == ("sdpa_flash", "auto")
    assert "fa2" in last_call().refused
    attention(*inputs, alibi_slopes=torch.ones(2))
    assert last_call().backend == "flash_torch"
    assert any("alibi" in reason for reason in last_call().refused["sdpa_flash"])
    inputs = [t.detach() for t in make_model_qkv(1, 1100, 1100, 1, 1, 8)]
    window = {"causal": True, "window_size": (16, -1)}
    attention(*inputs, **window)
    assert (last_call().backend, last_call().io_aware) == ("flash_torch", True)
    attention(*inputs, **window, backend="sdpa_flash")
    assert not last_call().io_aware
    assert "stored" in last_call().kernel
    # Queries without keys do not make a call look quadratic.
    attention(*make_model_qkv(1, 9, 4, 2, 2, 16), causal=True, backend="sdpa_flash")
    assert last_call().io_aware


def test_each_thread_has_its_own_last_call_and_the_table_prints():
    attention(*make_model_qkv(1, 8, 8, 2, 2, 16), backend="standard")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(last_call).result() is None
    assert last_call().backend == "standard"
    table = available_backends(device="cpu")
    assert [status.name for status in table] == [entry.name for entry in BACKENDS]
    assert table["standard"].runs
    assert "runs on cuda, not on cpu" in str(table)
    assert "<table>" in table._repr_html_()


@pytest.mark.parametrize("name", ["sdpa_flash", "flash_torch", "standard", "sdpa_math"])
def test_autocast_changes_neither_dtype_nor_precision(name):
    q, k, v = make_model_qkv(1, 32, 32, 2, 2, 16)
    expected = oracle_attention(*to_math_layout(q, k, v))[0].transpose(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, backend=name)
        out.sum().backward()
    assert out.dtype == q.grad.dtype == torch.float32
    assert (out - expected).abs().max() < 1e-5


def test_packed_calls_choose_and_report_for_every_document():
    q, k, v = (t[0].detach() for t in make_model_qkv(1, 10, 10, 2, 2, 8))
    packed = {"cu_seqlens_q": offsets([4, 6]), "cu_seqlens_k": offsets([4, 6])}
    attention_varlen(q, k, v, **packed, window_size=(1, 1), backend="sdpa_flash")
    assert "stored" in last_call().kernel
    assert "once per sequence" in last_call().kernel
    # One kernel for all sequences is preferred to a loop over them.
    loop = by_name("sdpa_flash")
    at_once = replace(by_name("flash_torch"), name="at once", takes_packed=True)
    call, batched = AttentionCall(q, k, v, **packed), AttentionCall(q[None], k[None], v[None])
    assert choose(call, "auto", (loop, at_once))[0].name == "at once"
    assert choose(call, "sdpa_flash", (loop, at_once))[0].name == "sdpa_flash"
    assert choose(batched, "auto", (loop, at_once))[0].name == "sdpa_flash"
    # What prepares for each new length is not chosen beside a growing cache.
    assert shape_comes_back(batched)
    assert not shape_comes_back(AttentionCall(q[None, :3], k[None], v[None]))
    q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    attention_varlen(q, k, v, **packed)
    assert last_call().backend == "flash_torch"
    assert "contiguous" in available_backends(q, k, v, **packed)["sdpa_flash"].reasons[0]


# --- one plan for each signature ------------------------------------------------------------------


def signatures():
    q, k, v = (t.detach() for t in make_model_qkv(1, 9, 12, 4, 2, 16))
    yield (q.double(), k.double(), v.double()), {}
    yield (q[:, :5], k, v), {}
    yield (q.mT.contiguous().mT, k.mT.contiguous().mT, v.mT.contiguous().mT), {}
    options = [{}, {"causal": True}, {"causal": True, "window_size": (3, -1)}]
    options += [{"window_size": [3, 2]}, {"softmax_scale": 0.3}, {"backend": "standard"}]
    options += [{"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES.expand(1, -1) * 2}]
    for each in (*options, {"return_lse": True}):
        yield (q, k, v), each
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


def test_the_front_door_compiles_to_the_same_results_and_reports():
    torch.compiler.reset()
    options = {"backend": "sdpa_flash", "window_size": (3, 3), "return_lse": True}
    results, reports = [], []
    for function in (torch.compile(attention, backend="eager"), attention):
        inputs = [t.detach().requires_grad_() for t in make_model_qkv(1, 16, 24, 4, 2, 8)]
        outs = function(*inputs, **options)
        reports.append(last_call())
        results.append([*outs, *torch.autograd.grad(outs[0].sum(), inputs)])
    for got, right in zip(*results, strict=True):
        assert torch.equal(got, right)
    assert reports[0] == reports[1]


def test_a_function_of_ones_own_is_a_backend():
    def own(q, k, v, is_causal):
        return flash_attention_forward(q, k, v, is_causal)[0]

    q, k, v = make_model_qkv(1, 6, 9, 4, 2, 8)
    register_backend("mine", own)
    try:
        expected = attention(q, k, v, causal=True, backend="standard")
        torch.testing.assert_close(attention(q, k, v, causal=True, backend="mine"), expected)
        assert last_call().kernel == "own"
        with pytest.raises(BackendUnavailableError, match="sliding windows"):
            attention(q, k, v, window_size=(3, 0), backend="mine")
        register_backend("mine", lambda q, k, v, is_causal: torch.zeros_like(q))
        assert not attention(q, k, v, causal=True, backend="mine").any()
    finally:
        implementations.own.clear()
    with pytest.raises(ValueError, match="is a backend of the lab's"):
        register_backend("standard", own)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_float32_with_grouped_heads_takes_the_fastest_kernel_of_a_gpu(kv_heads):
    inputs = make_model_qkv(2, 96, 96, 6, kv_heads, 32, device="cuda")
    assert_obeys_error_rule(
        lambda q, k, v: attention(q, k, v, causal=True), inputs,
        math_layout=to_math_layout, back=lambda t: t.transpose(1, 2), causal=True,
    )  # fmt: skip
    assert last_call().backend == "sdpa_efficient"
    assert last_call().kernel.endswith("key heads repeated")


def test_the_measured_order_depends_on_gradients_head_dim_mask_length_and_work():
    def order(batch, seqlen, head_dim, causal, grad=False):
        q = torch.empty(batch, seqlen, 2048 // head_dim, head_dim, device="meta")
        return fastest(AttentionCall(q.requires_grad_(grad), q, q, causal=causal))

    assert order(1, 512, 128, True)[0] == "sdpa_cudnn"
    assert order(1, 512, 128, True, grad=True)[0] == "sdpa_flash"
    assert order(16, 1024, 128, True)[:2] == ["sdpa_cudnn", "flash_gluon"]
    assert order(8, 2048, 128, True)[0] == "flash_gluon"
    assert order(16, 1024, 64, False, grad=True)[0] == "fa4"
    assert order(1, 100_000, 64, True) == ["fa4", "flash_gluon", "sdpa_cudnn", "sdpa_flash"]
    for orders in ORDERS.values():
        assert [sorted(order) for order in orders.split()] == [sorted(NAMES)] * (1 + len(LENGTHS))
    q = torch.empty(1, 4, 2, 8)
    call = AttentionCall(q, q, q)
    assert in_order(BACKENDS, call) == list(BACKENDS)  # not measured on a CPU
