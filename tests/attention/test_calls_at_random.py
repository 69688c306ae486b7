"""Calls of `attention` drawn at random: right by the error rule, or refused by name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.attention import (
    AttentionInputError,
    BackendUnavailableError,
    attention,
    available_backends,
    compare_with_oracle,
    oracle_attention,
    standard_attention,
)
from labsupport.attention.reference import masked_attention
from tests.attention.cases import to_math_layout

NAMES = [one.name for one in available_backends(device="cpu") if one.runs]
QUICK = [name for name in NAMES if name not in ("flex", "flash_triton")]  # compiled, interpreted
SIZES, DTYPES = st.integers(1, 9), [torch.float64, torch.float32, torch.bfloat16, torch.float16]
GOOD = {
    "causal": st.booleans(),
    "window_size": st.tuples(st.integers(-1, 9), st.integers(-1, 9)) | st.just([2, 1]),
    "softcap": st.sampled_from([0.0, 0, 0.7, 30]),
    "softmax_scale": st.sampled_from([None, 0.3, 1, 0.0, -0.5]),
    "return_lse": st.booleans(),
}
BAD = {  # option: values that make no sense
    "causal": [1, None, "yes", torch.tensor(True)],
    "window_size": [3, (1,), (-2, 0), (1.0, 0), (True, 1), None, (1, 2, 3)],
    "softcap": [-1.0, float("nan"), float("inf"), None, "2", True, torch.tensor(1.0)],
    "softmax_scale": [float("nan"), float("inf"), True, "1", torch.tensor(0.5), 1j],
    "return_lse": [1, None, "yes"],
    "alibi_slopes": [torch.ones(11), [0.5], 0.5, torch.ones(1, 1, 1), torch.ones(2, 2, 2)],
    "mask": [None, torch.ones(2, 2)],
    "attn_mask": [None],
    "dropout_p": [0.0, 0.1],
    "is_causal": [False],
}


def strided(x, kind):
    """Values of x at other places in memory; an expanded tensor repeats its first batch or head."""
    if kind == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "sliced":
        return torch.stack([x, x], 2).flatten(1, 2)[:, ::2]
    if kind == "columns":  # the last dimension is not contiguous
        return x.mT.contiguous().mT
    if kind == "expanded":
        return x[:1].expand_as(x) if len(x) else x
    if kind == "shifted":  # not aligned to 16 bytes
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    return x


@st.composite
def calls(draw):
    """Inputs, options, and the names that a refusal has to give one of (none for a right call)."""
    batch, kv_heads, group = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
    )
    seqlen_q, seqlen_k, head_dim = draw(SIZES), draw(SIZES | st.just(20)), draw(st.integers(1, 17))
    heads, dtype = kv_heads * group, draw(st.sampled_from(DTYPES))
    shapes = [[batch, seqlen_q, heads, head_dim], *[[batch, seqlen_k, kv_heads, head_dim]] * 2]
    dtypes, wrong = [dtype] * 3, set()
    options = {name: draw(value) for name, value in GOOD.items() if draw(st.booleans())}
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(heads,), (batch, heads)]))
        options["alibi_slopes"] = torch.rand(shape)
    match draw(st.sampled_from(["right"] * 6 + ["option", "dtype", "shape", "empty"])):
        case "option":
            name = draw(st.sampled_from(sorted(BAD)))
            options[name] = draw(st.sampled_from(BAD[name]))
            wrong = {name}
        case "dtype":
            which = draw(st.integers(0, 2))
            dtypes[which] = draw(
                st.sampled_from([torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
            )
            wrong = {"dtype"}
        case "shape":
            which, dim = draw(st.integers(0, 2)), draw(st.integers(0, 3))
            shapes[which] = list(shapes[which])
            shapes[which][dim] += 1
            if (which, dim) != (0, 1) and not (which == 0 and dim == 2 and kv_heads == 1):
                wrong = {"q ("}
            elif dim == 2:
                options.pop("alibi_slopes", None)
        case "empty":
            dim = draw(st.integers(0, 3))
            for shape in shapes if draw(st.booleans()) or dim != 1 else shapes[1:]:
                shape[dim] = 0
            options.pop("alibi_slopes", None)
            wrong = {"q ("} if dim else set()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    q, k, v = (
        strided(torch.randn(shape, generator=generator).to(dtype), draw(LAYOUTS))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    if draw(st.booleans()) and q.numel() and q.is_floating_point() and q.itemsize > 1:
        q = q.clone()
        q[:, draw(st.integers(0, q.shape[1] - 1))] = torch.nan
    return (q, k, v), options, wrong


LAYOUTS = st.sampled_from(["", "transposed", "sliced", "columns", "expanded", "shifted"])


def check(name, inputs, options, wrong):
    before = [x.clone() for x in inputs]
    try:
        result = attention(*inputs, backend=name, **options)
    except (AttentionInputError, TypeError, BackendUnavailableError) as error:
        refused = error
    else:
        refused = None
    if wrong:
        assert isinstance(refused, AttentionInputError | TypeError)
        assert any(word in str(refused) for word in wrong), refused
        return
    if refused is not None:
        assert name != "auto"
        assert refused.reasons[name], refused
        return
    for x, same in zip(inputs, before, strict=True):
        assert torch.equal(x.nan_to_num(), same.nan_to_num())
    options = dict(options)
    with_lse = options.pop("return_lse", False)
    out, lse = result if with_lse else (result, None)
    q, k, v = inputs
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    if not out.numel():
        return
    math = to_math_layout(q, k, v)
    exact, exact_lse = oracle_attention(*math, **options)
    textbook, textbook_lse = masked_attention(*math, **options, return_lse=True)
    lost = q.isnan().any(-1) & (k.shape[1] < 16)  # PyTorch's kernel makes those rows 0
    pairs = [(out.transpose(1, 2), textbook, exact)]
    pairs += [(lse, textbook_lse, exact_lse)] if with_lse else []
    for got, book, right in pairs:
        nan = right.isnan()
        assert torch.equal(got.isnan(), nan) or (name in ("auto", "sdpa_flash") and lost.any())
        got, book, right = (x.masked_fill(nan, 0) for x in (got, book, right))
        report = compare_with_oracle(got, book, right)
        size = max(v.abs().max().item(), 1.0)  # of few numbers textbook attention may hit one
        assert report.ok or report.max_error < 4 * torch.finfo(q.dtype).eps * size, report


@settings(max_examples=100, deadline=None)
@given(calls(), st.sampled_from(["auto", *QUICK]))
def test_a_call_of_any_kind_is_right_or_refused_by_name(call, name):
    check(name, *call)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(calls(), st.sampled_from(["auto", *QUICK, "flash_triton"]))
def test_many_calls_are_right_or_refused_by_name(call, name):
    check(name, *call)


MASKS = {  # a mask of 0 and 1 in this form
    "boolean": lambda x: x.bool(),
    "floating": lambda x: torch.where(x.bool(), x / 2, -torch.inf),
    "small numbers": lambda x: -x.half(),
    "0 and 1": lambda x: x.index_fill(-1, torch.tensor([0]), 1.0),
    "integers": lambda x: x.long(),
    "a list": lambda x: x.tolist(),
}


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(MASKS)),
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    ones=st.lists(st.integers(0, 3), max_size=4),
    dtype=st.sampled_from(DTYPES),
    layout=LAYOUTS,
    options=st.fixed_dictionaries(
        {}, optional={"causal": GOOD["causal"], "softmax_scale": GOOD["softmax_scale"]}
    ),
    seed=st.integers(0, 99),
)
def test_a_mask_of_any_kind_hides_what_it_says_or_is_refused(
    kind, sizes, ones, dtype, layout, options, seed
):
    generator = torch.Generator().manual_seed(seed)
    batch, heads, seqlen_q, seqlen_k = sizes
    q, k, v = (
        strided(torch.randn(batch, heads, n, 3, generator=generator).to(dtype), layout)
        for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    shape = [1 if dim in ones else size for dim, size in enumerate(sizes)][min(len(ones), 2) :]
    mask = MASKS[kind](torch.randint(2, shape, generator=generator).float())
    if kind in ("0 and 1", "integers", "a list"):
        with pytest.raises(AttentionInputError, match="mask"):
            standard_attention(q, k, v, mask, **options)
        return
    before = mask.clone()
    output, weights = standard_attention(q, k, v, mask, **options)
    exact, _ = oracle_attention(q, k, v, mask, **options)
    torch.testing.assert_close(output, exact.to(dtype), atol=4 * torch.finfo(dtype).eps, rtol=0.03)
    hidden = (before == (0 if kind == "boolean" else -torch.inf)).expand(sizes)
    assert not weights[hidden].any()
    assert torch.equal(mask, before)
