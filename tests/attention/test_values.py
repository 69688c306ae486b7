"""No call computes something else without a word: the right value, or an error that says why."""

import contextlib
import inspect
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labsupport.attention import (
    BackendUnavailableError,
    FlashAttentionFunction,
    TritonFlashAttentionFunction,
    attention,
    available_backends,
)
from labsupport.attention.accuracy import compare_with_oracle, relative_error
from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.masks import alibi_bias
from labsupport.attention.online_softmax import online_softmax
from labsupport.attention.reference import standard_attention

Q, K, V = torch.randn(3, 1, 6, 2, 16, generator=torch.Generator().manual_seed(0))
RUNNING = [one.name for one in available_backends(Q, K, V) if one.runs]
TRAINING = [name for name in RUNNING if name != "flex"]  # compiled for many seconds per shape


def penalty(function, q, k, v):
    """The gradient of a gradient penalty: a second derivative, the first one by a constant."""
    q = q.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(q, k, v).sum(), q, create_graph=True)
    return torch.autograd.grad(slope.square().sum(), q)[0]


@pytest.mark.parametrize("name", [*TRAINING, FlashAttentionFunction, TritonFlashAttentionFunction])
def test_a_second_derivative_is_right_or_refused(name):
    function = partial(attention, backend=name) if isinstance(name, str) else name.apply

    if name in ("standard", "sdpa_math"):
        exact = penalty(
            lambda *qkv: attention(*qkv, backend="standard"), *map(torch.Tensor.double, (Q, K, V))
        )
        torch.testing.assert_close(penalty(function, Q, K, V).double(), exact, atol=1e-5, rtol=1e-4)
    else:
        compiled = name is TritonFlashAttentionFunction and torch.cuda.is_available()
        inputs = [x.cuda() if compiled else x for x in (Q, K, V)]
        with pytest.raises(RuntimeError, match=r"differentiated twice|is not implemented"):
            penalty(function, *inputs)


@pytest.mark.parametrize("name", TRAINING)
def test_both_passes_compile_as_one_graph(name):
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        q = Q.clone().requires_grad_()

        def function(q, k, v):
            return attention(q, k, v, causal=True, backend=name)

        run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
        out = run(q, K, V)
        results.append((out, *torch.autograd.grad(out.square().sum(), q)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": torch.nn.Parameter(torch.tensor(0.25))},
        {"softmax_scale": torch.nan},
        {"softmax_scale": True},
        {"causal": "no"},
        {"causal": None},
        {"causal": 1},
        {"window_size": (True, False)},
        {"window_size": (1.0, 0)},
    ],
    ids=str,
)
def test_what_is_no_number_or_switch_is_refused_by_every_backend(name, options):
    for equal in ({"softmax_scale": 1.0}, {"causal": True}, {"window_size": (1, 0)}):
        with contextlib.suppress(BackendUnavailableError):
            attention(Q, K, V, backend=name, **equal)  # whose plan the next call would find
    with pytest.raises(AttentionInputError, match=f"{next(iter(options))} is"):
        attention(Q, K, V, backend=name, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"softmax_scale": x}, "softmax_scale is") for x in (torch.nan, True, torch.ones(()))),
        ({"causal": 1}, "causal is"),
        ({"block_q": 0}, "block_q is"),
        ({"block_k": 2.5}, "block_k is"),
        ({"block_size": -1}, "block_q is"),
        ({"out": K[:, :, :, :1]}, "out must be"),
        ({"lse": 0.0}, "lse must be.*float was given"),
        ({"dout": [1.0]}, "dout must be.*list was given"),
    ],
    ids=str,
)
def test_the_mathematics_refuses_what_makes_no_sense(options, said):
    forward = {"out": Q, "lse": Q[..., 0], "dout": Q}
    for function in (standard_attention, flash_attention_forward, flash_attention_backward):
        own = inspect.signature(function).parameters
        renamed = {"is_causal" if "is_causal" in own and x == "causal" else x: y
                   for x, y in options.items()}  # fmt: skip
        if renamed.keys() <= own.keys():
            inputs = {"q": Q, "k": K, "v": V} | forward | renamed
            with pytest.raises(AttentionInputError, match=said):
                function(**{name: inputs[name] for name in own if name in inputs})


@pytest.mark.parametrize(
    ("option", "where"),
    [("attn_mask", "standard_attention"), ("score_mod", "flex_attention"), ("softcaps", "softcap")],
)
def test_an_option_of_another_function_is_refused_with_its_place(option, where):
    with pytest.raises(TypeError, match=f"no option '{option}': .*{where}"):
        attention(Q, K, V, **{option: None})


@given(
    rows=st.integers(1, 600),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    start=st.integers(0, 70_000),
)
@settings(max_examples=25, deadline=None)
def test_alibi_distances_are_exact_in_16_bits_too(rows, dtype, start):
    slopes = torch.tensor([0.5, 2.0**-8])
    bias = alibi_bias(slopes, slice(0, rows), slice(start, start + 8), 0, dtype)
    i, j = torch.arange(rows)[:, None], torch.arange(start, start + 8)
    exact = -slopes.double()[:, None, None] * (i - j).abs()
    assert torch.equal(bias, exact.to(dtype))


@given(cols=st.integers(1, 20_000), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
@settings(max_examples=25, deadline=None)
def test_a_sum_of_many_small_numbers_keeps_growing(cols, dtype):
    probabilities, lse = online_softmax(torch.zeros(1, cols, dtype=dtype))
    assert torch.equal(probabilities, torch.full((1, cols), 1 / cols).to(dtype))
    assert torch.equal(lse, torch.tensor([cols]).double().log().to(dtype))


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, 0.0])
def test_equal_results_are_within_the_rule_whatever_they_hold(value):
    same = torch.tensor([value, 1.0])
    found = compare_with_oracle(same, same, same.double())
    assert found.ok
    assert found.max_error == 0
    assert relative_error(same[:1], same[:1].double()) == 0


@pytest.mark.parametrize(("got", "right"), [(torch.nan, 0.0), (torch.inf, 0.0), (0.0, -torch.inf)])
def test_nan_and_one_infinity_are_never_within_the_rule(got, right):
    textbook, oracle = torch.tensor([right]), torch.tensor([right], dtype=torch.float64)
    assert not compare_with_oracle(torch.tensor([got]), textbook, oracle).ok


@pytest.mark.parametrize("shape", [(1, 6), (2, 6, 6), (7, 6), (1, 1, 1, 6, 6)])
def test_a_mask_that_does_not_broadcast_is_refused(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    scores = (1, 2, 6, 6)
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    try:
        fits = torch.broadcast_shapes(shape, scores) == scores
    except RuntimeError:
        fits = False
    if fits:
        standard_attention(q, k, v, mask)
    else:
        with pytest.raises(AttentionInputError, match="must broadcast"):
            standard_attention(q, k, v, mask)
