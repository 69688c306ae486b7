"""FlexAttention, compiled: few cases, because each shape and mask compiles for many seconds."""

import pytest
import torch

from labsupport.attention import (
    attention,
    available_backends,
    compare_with_oracle,
    oracle_attention,
)
from labsupport.attention.reference import masked_attention
from tests.attention.cases import DEVICES, make_model_qkv, to_math_layout


@pytest.mark.slow
@pytest.mark.filterwarnings("error:flex_attention called without torch.compile")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window_size": (9, -1)}, {"alibi": True}],
    ids=str,
)
def test_flex_attention_obeys_the_error_rule(options, device):
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.linspace(0.1, 0.4, 4, device=device)
    inputs = [t.detach() for t in make_model_qkv(2, 64, 128, 4, 2, 32, device=device)]
    status = available_backends(*inputs, **options)["flex"]
    if not status.runs:
        pytest.skip("; ".join(status.reasons))
    out = attention(*inputs, backend="flex", **options)
    math = to_math_layout(*inputs)
    oracle, oracle_lse = oracle_attention(*math, **options)
    textbook, _ = masked_attention(*math, **options)
    report = compare_with_oracle(out.transpose(1, 2), textbook, oracle)
    assert report.ok, report
    if device == "cuda":
        _, lse = attention(*inputs, backend="flex", return_lse=True, **options)
        assert (lse.double() - oracle_lse).abs().max() < 1e-2


def test_flex_attention_says_that_it_has_no_backward_on_a_cpu():
    inputs = make_model_qkv(1, 16, 16, 2, 2, 16)
    status = available_backends(*inputs)["flex"]
    assert not status.runs
    assert "gradients on a CPU" in " ".join(status.reasons)
