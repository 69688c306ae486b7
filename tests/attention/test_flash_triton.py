"""The Triton kernels, compiled on a GPU and interpreted on a CPU, against the error rule.

The grid is flash-attn's: odd lengths, odd head sizes, grouped heads, masks. On a CPU it is covered
by one case for each length, head size, grouping and mask; on a GPU all of it runs.
"""

import itertools
import math
import sys

import pytest
import torch

from labsupport.attention import (
    FlashAttentionFunction,
    TritonFlashAttentionFunction,
    attention,
    attention_varlen,
    compare_with_oracle,
    merge_attention,
    oracle_attention,
)
from labsupport.attention.kernels import mode
from labsupport.attention.reference import masked_attention
from tests.attention.cases import (
    assert_obeys_error_rule,
    compiled_elsewhere,
    make_model_qkv,
    make_qkv,
    to_math_layout,
)

if sys.platform != "linux":
    pytest.skip("Triton exists for Linux only", allow_module_level=True)

from labsupport.attention.kernels.autograd import (
    backward_operator,
    flash_attention_triton,
    forward_operator,
)
from labsupport.attention.kernels.version1 import forward_version1

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
LENGTHS = [
    (113, 203), (128, 217), (113, 211), (108, 256), (1, 239), (3, 799), (127, 513), (1023, 1024),
    (1024, 1023), (2048, 2048), (203, 113), (64, 64),
]  # fmt: skip
HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
GROUPS = [(2, 2), (4, 2), (3, 1)]
MASKS = [
    {},
    {"causal": True},
    {"window_size": (40, 0)},
    {"window_size": (30, 50)},
    {"window_size": (-1, 7)},
    {"window_size": (25, -1)},
    {"causal": True, "window_size": (70, 0)},
]


def covering():
    """Cases in which each length, head size, grouping, mask and dtype occurs."""
    if GPU:
        yield from itertools.product(LENGTHS, HEAD_DIMS, GROUPS, MASKS, DTYPES)
        return
    short = [pair for pair in LENGTHS if max(pair) < 1000]
    rest = zip(*(itertools.cycle(x) for x in (HEAD_DIMS, GROUPS, MASKS)), strict=False)
    for i, (head_dim, group, mask) in zip(range(24), rest, strict=False):
        yield short[i % len(short)], head_dim, group, mask, DTYPES[i // 3 % 2]
    yield (1023, 1024), 64, (1, 1), {"causal": True}, torch.float32


def test_triton_comes_with_the_lab():
    """On Linux its absence is a failure, not a reason to test less."""
    assert mode.missing() is None


def case_name(value):
    return str(value).replace(" ", "").replace("torch.", "")


def triton_attention(q, k, v, **options):
    return attention(q, k, v, backend="flash_triton", **options)


def back(out):
    return out.transpose(1, 2)


@pytest.mark.parametrize(
    ("lengths", "head_dim", "groups", "mask", "dtype"), list(covering()), ids=case_name
)
def test_output_and_gradients_obey_the_error_rule(lengths, head_dim, groups, mask, dtype):
    batch = 1 if max(lengths) > 700 else 2
    inputs = make_model_qkv(batch, *lengths, *groups, head_dim, dtype=dtype, device=DEVICE)
    assert_obeys_error_rule(
        lambda q, k, v: triton_attention(q, k, v, **mask),
        inputs,
        math_layout=to_math_layout,
        back=back,
        **mask,
    )


@pytest.mark.parametrize(("head_dim", "dtype"), [(32, DTYPES[0]), (224, DTYPES[-1])])
def test_one_key_gets_all_the_weight_whatever_its_score(head_dim, dtype):
    q, k, v = make_model_qkv(2, 1, 1, 3, 1, head_dim, dtype=dtype, device=DEVICE)
    out = triton_attention(q, k, v)
    assert (out - v).abs().max() <= torch.finfo(dtype).eps * v.abs().max()
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    exact = dout.double().sum(2, keepdim=True)
    # The weight is exp(s - L): rounding the exponent moves it by some units in the last place.
    assert (dv - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()
    # dS = dP - D is the difference of two equal sums, each rounded to float32 in its own order.
    assert max(dq.abs().max(), dk.abs().max()) < head_dim * 2**-20


def test_strides_are_taken_as_they_are_and_nothing_is_copied(monkeypatch):
    """Heads first in memory, every second head of a larger tensor, keys and values in one."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, torch.float16)

    q = draw(2, 3, 70, 40).transpose(1, 2)
    k, v = draw(2, 90, 6, 80)[:, :, ::2].chunk(2, dim=-1)
    assert not any(x.is_contiguous() for x in (q, k, v))
    expected = triton_attention(*(x.contiguous() for x in (q, k, v)), causal=True)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = triton_attention(*leaves, causal=True)
    assert torch.equal(out, expected)
    assert [g.shape for g in torch.autograd.grad(out.sum(), leaves)] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_ten_thousand_stay_finite(dtype):
    q, k, v = make_model_qkv(1, 70, 70, 1, 1, 64, dtype=dtype, device=DEVICE)
    q, k = (x.detach() * math.sqrt(4000) for x in (q, k))
    out, lse = flash_attention_triton(q, k, v, causal=True)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert lse.abs().max() > 1e4
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().sum(), v))


def test_rows_without_a_key_give_zero_and_minus_infinity_and_no_gradient():
    q, k, v = make_model_qkv(1, 100, 30, 2, 1, 32, device=DEVICE)
    out, lse = flash_attention_triton(q, k, v, causal=True)
    assert (out[:, :70] == 0).all()
    assert (lse[..., :70] == -torch.inf).all()
    assert lse[..., 70:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq[:, :70] == 0).all()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


def test_a_window_of_two_billion_is_no_window():
    q, k, v = make_model_qkv(1, 70, 90, 1, 1, 32, device=DEVICE)
    endless = 2**31 - 1
    out = triton_attention(q, k, v, window_size=(endless, endless))
    assert torch.allclose(out, triton_attention(q, k, v), atol=1e-6)
    causal = triton_attention(q, k, v, causal=True, window_size=(endless, 0))
    assert torch.allclose(causal, triton_attention(q, k, v, causal=True), atol=1e-6)


def test_alibi_by_head_and_by_sequence():
    for slopes in (torch.tensor([0.5, 0.1]), torch.tensor([[0.5, 0.1], [0.0, 0.3]])):
        slopes = slopes.to(DEVICE)
        inputs = make_model_qkv(2, 70, 90, 2, 2, 32, device=DEVICE)
        assert_obeys_error_rule(
            lambda q, k, v, slopes=slopes: triton_attention(
                q, k, v, causal=True, alibi_slopes=slopes
            ),
            inputs,
            math_layout=to_math_layout,
            back=back,
            causal=True,
            alibi_slopes=slopes,
        )


def test_packed_sequences_in_one_launch_equal_each_by_itself():
    lengths_q, lengths_k = [70, 1, 0, 40, 129], [70, 33, 5, 0, 129]
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=DEVICE)
        for n in (lengths_q, lengths_k)
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(total, heads, 32, generator=generator).to(DEVICE).requires_grad_()
        for total, heads in ((sum(lengths_q), 4), (sum(lengths_k), 2), (sum(lengths_k), 2))
    )
    dout = torch.randn(q.shape, generator=generator).to(DEVICE)
    results = {}
    for backend in ("flash_triton", "standard"):
        out, lse = attention_varlen(
            q, k, v, cu_q, cu_k, causal=True, backend=backend, return_lse=True
        )
        results[backend] = (out, lse, *torch.autograd.grad(out, (q, k, v), dout))
    for got, expected in zip(results["flash_triton"], results["standard"], strict=True):
        assert torch.equal(got.isinf(), expected.isinf())
        assert (got - expected).nan_to_num(0, 0, 0).abs().max() < 1e-5


def test_the_backward_gives_the_same_bits_every_time():
    q, k, v = make_model_qkv(2, 150, 170, 4, 2, 64, dtype=torch.float16, device=DEVICE)
    out = triton_attention(q, k, v, causal=True).float().square().sum()
    runs = [torch.autograd.grad(out, (q, k, v), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_gradient_of_the_log_sum_exp_is_right():
    q, k, v = make_model_qkv(1, 50, 70, 2, 2, 32, device=DEVICE)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_out, exact_lse = oracle_attention(*to_math_layout(*wide), causal=True)
    expected = torch.autograd.grad(exact_out.sum() + exact_lse.sin().sum(), wide)
    out, lse = flash_attention_triton(q, k, v, causal=True)
    got = torch.autograd.grad(out.sum() + lse.sin().sum(), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_partial_outputs_in_float32_merge_as_if_they_had_been_one():
    q, k, v = (
        x.detach() for x in make_model_qkv(1, 60, 200, 2, 2, 64, dtype=torch.float16, device=DEVICE)
    )
    parts = [
        flash_attention_triton(q, k[:, cut], v[:, cut], float32_out=True)
        for cut in (slice(0, 90), slice(90, 200))
    ]
    assert parts[0][0].dtype == torch.float32
    merged, lse = merge_attention(*(x for o, l in parts for x in (o.transpose(1, 2), l)))
    whole, whole_lse = flash_attention_triton(q, k, v, float32_out=True)
    # Weights are rounded to float16 relative to the maximum of their own part.
    assert (merged.transpose(1, 2) - whole).abs().max() < 4 * 2**-11 * whole.abs().max()
    assert (lse - whole_lse).abs().max() < 1e-5


def test_more_heads_and_sequences_than_a_second_grid_axis_could_hold():
    """CUDA's y and z axes end at 65,535. (Interpreted, 600 of them do the same arithmetic.)"""
    batch = 65_536 if GPU else 300
    q, k, v = (torch.randn(batch, 2, 1, 16, device=DEVICE) for _ in range(3))
    out = triton_attention(q, k, v)
    assert (out - attention(q, k, v, backend="standard")).abs().max() < 1e-5


@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_offsets_beyond_two_billion_elements():
    batch, seqlen, heads, head_dim = 3, 2048, 4096, 128  # 3.2 billion elements
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    q = torch.randn(batch, seqlen, heads, head_dim, device=DEVICE, dtype=torch.float16)
    out, _ = flash_attention_triton(q, q, q)
    last = q[-1:, :, -1:]
    expected = attention(last, last, last, backend="sdpa_flash")
    ulp = torch.finfo(torch.float16).eps * expected.abs().max()
    assert (out[-1:, :, -1:] - expected).abs().max() <= 2 * ulp


def test_the_operators_pass_pytorchs_own_checks():
    q, k, v = make_model_qkv(1, 40, 50, 2, 1, 16, device=DEVICE)
    slopes = torch.tensor([0.5, 0.25], device=DEVICE)
    q, k, v = (x.detach() for x in (q, k, v))  # the operators have no gradients themselves
    geometry = 0.25, 9, 0, slopes, None, None, 0, 0, "ieee"
    torch.library.opcheck(forward_operator, (q, k, v, False, *geometry))
    out, lse = forward_operator(q, k, v, False, *geometry)
    for dlse in (lse, None):
        torch.library.opcheck(backward_operator, (out, dlse, q, k, v, out, lse, *geometry))


@pytest.mark.parametrize(
    ("lengths", "causal", "dtype"),
    [((70, 130), True, DTYPES[0]), ((130, 70), True, DTYPES[-1]), ((64, 64), False, DTYPES[0])],
)
def test_version_one_computes_the_same_in_its_own_order(lengths, causal, dtype):
    q, k, v = (
        x.detach() for x in make_model_qkv(2, *lengths, 4, 2, 40, dtype=dtype, device=DEVICE)
    )
    out, lse = forward_version1(q, k, v, causal=causal)
    exact, exact_lse = oracle_attention(*to_math_layout(q, k, v), causal=causal)
    textbook, _ = masked_attention(*to_math_layout(q, k, v), causal=causal)
    assert compare_with_oracle(out.transpose(1, 2).to(dtype), textbook, exact).ok
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    assert (lse - exact_lse).nan_to_num(0).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("lengths", "causal"), [((40, 40), True), ((33, 70), True), ((33, 70), False)]
)
def test_the_function_of_the_papers_layout_saves_the_log_sum_exp(lengths, causal):
    """Tests of university courses look for it among the saved tensors, by its shape."""
    leaves = make_qkv(3, seqlen_q=lengths[0], seqlen_k=lengths[1], device=DEVICE)
    out = TritonFlashAttentionFunction.apply(*leaves, causal)
    (lse,) = [t for t in out.grad_fn.saved_tensors if t.shape == (3, lengths[0])]
    same = FlashAttentionFunction.apply(*leaves, causal)
    _, exact_lse = oracle_attention(*leaves, causal=causal)
    assert (lse - exact_lse).abs().max() < 1e-5
    grads = [torch.autograd.grad(o.square().sum(), leaves) for o in (out, same)]
    for a, b in zip((out, *grads[0]), (same, *grads[1]), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 1e-5
    two = TritonFlashAttentionFunction.apply(*(x[0] for x in leaves), causal)
    assert torch.equal(two, out[0])


def of_both_outputs(q, k, v):
    out, lse = flash_attention_triton(q * 2, k, v, causal=True)
    return out.square().sum() + lse.sin().sum()


def with_slopes(q, k, v):
    slopes = torch.tensor([0.5, 0.25], device=DEVICE)
    return flash_attention_triton(q * 2, k, v, causal=True, alibi_slopes=slopes)[0].square()


def of_the_papers_layout(q, k, v):
    return TritonFlashAttentionFunction.apply(q * 2, k, v, True).square()


@pytest.mark.parametrize("function", [of_both_outputs, with_slopes, of_the_papers_layout])
def test_it_compiles_without_a_graph_break(function):
    q, k, v = make_model_qkv(1, 40, 40, 2, 2, 16, device=DEVICE)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(q, k, v).sum(), (q, k, v))
    got = torch.autograd.grad(compiled(q, k, v).sum(), (q, k, v))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k.half(), v), "one dtype, float16, bfloat16 or float32"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "one dtype, float16"),
        (lambda q, k, v: (q, k.to("meta"), v), "one device"),
        pytest.param(
            lambda q, k, v: (q.bfloat16(), k.bfloat16(), v.bfloat16()),
            "interpreter computes bfloat16 wrongly",
            marks=pytest.mark.skipif(GPU, reason="compiled, bfloat16 is right"),
        ),
        (lambda q, k, v: [x.repeat(1, 1, 1, 9) for x in (q, k, v)], "head_dim must be 1 to 256"),
    ],
)
def test_what_the_kernels_cannot_take_gets_a_clear_error(change, message):
    q, k, v = (torch.zeros(1, 4, 1, 32, device=DEVICE) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        flash_attention_triton(*change(q, k, v))


# Everything but the compiler and the GPU, which take part in neither kind of launch.
LAUNCH_TWICE = """
class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

class Compiled:
    function = packed_metadata = None
    def __init__(self, kernel): self.kernel = kernel
    def launch_metadata(self, *rest): return None
    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        launches.append((self.kernel, (x, y, z), arguments))
    def __getitem__(self, grid):
        return lambda *arguments: launches.append((self.kernel, grid, arguments))

launches = []
triton.runtime.driver.set_active(Hopper())
triton.runtime.jit.JITFunction._do_compile = lambda self, key, *rest: (
    self.device_caches[0][0].setdefault(key, Compiled(self.fn.__name__))
)
from labsupport.attention.kernels.autograd import backward, forward
from labsupport.attention.kernels.config import Geometry

def same(a, b):
    a, b = (getattr(x, "base", x) for x in (a, b))
    if isinstance(a, torch.Tensor):
        return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    return a == b

def twice(call):
    launches.clear()
    call(), call()
    half = len(launches) // 2
    for (name, *a), (other, *b) in zip(launches[:half], launches[half:], strict=True):
        assert (name, a[0]) == (other, b[0]) and all(map(same, a[1], b[1])), name
        print(name)

q, k = torch.randn(2, 70, 4, 64).half(), torch.randn(2, 90, 2, 64).half()
for geometry, hopper in ((Geometry(0.1, 5, 0, torch.rand(2, 4)), False), (Geometry(0.2), True)):
    out, lse = forward(q, k, k, geometry, hopper=hopper)
    twice(lambda: forward(q, k, k, geometry, hopper=hopper))
    twice(lambda: backward(out, q, k, k, out, lse, geometry, hopper=hopper))
"""


def test_a_cached_launch_passes_the_arguments_of_the_first_one(project, tmp_path):
    launched = compiled_elsewhere(LAUNCH_TWICE, project, tmp_path)
    plain = ["_attn_fwd", "_bwd_preprocess", "_bwd_dkdv", "_bwd_dq"]
    assert launched == [*plain, "_hopper_fwd", "_bwd_preprocess", "_hopper_dkdv", "_hopper_dq"]
