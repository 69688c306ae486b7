"""No call computes something else without a word: the right value, or an error that says why."""

from functools import partial

import pytest
import torch

from labsupport.attention import (
    FlashAttentionFunction,
    TritonFlashAttentionFunction,
    attention,
    available_backends,
)

Q, K, V = torch.randn(3, 1, 6, 2, 16, generator=torch.Generator().manual_seed(0))
RUNNING = [one.name for one in available_backends(Q, K, V) if one.runs]
TRAINING = [name for name in RUNNING if name != "flex"]  # compiled for many seconds per shape


def penalty(function, q, k, v):
    """The gradient of a gradient penalty: a second derivative, the first one by a constant."""
    triton = function is TritonFlashAttentionFunction.apply and torch.cuda.is_available()
    q, k, v = (x.to("cuda" if triton else x.device) for x in (q, k, v))
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
        with pytest.raises(RuntimeError, match=r"differentiated twice|is not implemented"):
            penalty(function, Q, K, V)


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
