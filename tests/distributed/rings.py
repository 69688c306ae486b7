"""Rings for tests: masks, what runs on a rank, and the whole result put together."""

import torch
import torch.distributed as dist

from labsupport.distributed.ring import (
    last_ring_call,
    ring_flash_attn_func,
    shard_sequence,
    triton_ring_flash_attn_func,
    unshard_sequence,
    zigzag_ring_flash_attn_func,
)
from tests.attention.cases import gradients, make_model_qkv

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "scaled": {"causal": True, "softmax_scale": 0.7},
    "short window": {"causal": True, "window_size": (2, 0)},
    "window over several shards": {"causal": True, "window_size": (8, 0)},
    "window on both sides": {"window_size": (3, 2)},
    "window with one open side": {"window_size": (-1, 4)},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "alibi, full": {"alibi_slopes": SLOPES},
    "alibi by batch in a window": {
        "window_size": (7, 1),
        "alibi_slopes": torch.stack((SLOPES, SLOPES.flip(0))),
    },
}
FUNCTIONS = {
    "ring": ring_flash_attn_func,
    "triton": triton_ring_flash_attn_func,
    "zigzag": zigzag_ring_flash_attn_func,
}


def attend(rank, group, function, q, k, v, dout, options):
    """On a rank: its shards of out, lse, dq, dk and dv, and the report."""
    size, zigzag = dist.get_world_size(group), function == "zigzag"
    shards = [shard_sequence(x, rank, size, zigzag=zigzag) for x in (q, k, v, dout)]
    *inputs, dout = (x.clone().requires_grad_() for x in shards)
    out, lse = FUNCTIONS[function](*inputs, return_lse=True, group=group, **options)
    results = out.detach(), lse, *gradients(out, inputs, dout.detach())
    return results, last_ring_call()


def refusal(rank, group, make_inputs, options, function="ring"):
    """On a rank: the name and the text of the error."""
    try:
        FUNCTIONS[function](*make_inputs(rank), group=group, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def distributed(workers, ranks, inputs, dout, function="ring", **options):
    """Whole out, lse, dq, dk and dv of a ring, and each rank's report."""
    tensors = [x.detach() for x in inputs]
    options.setdefault("causal", False)
    answers = workers.run(attend, function, *tensors, dout, options, ranks=ranks)
    parts = zip(*(results for results, _ in answers), strict=True)
    whole = [
        unshard_sequence(list(part), zigzag=function == "zigzag", dim=2 if name == "lse" else 1)
        for name, part in zip(("out", "lse", "dq", "dk", "dv"), parts, strict=True)
    ]
    return whole, [report for _, report in answers]


def shards_of(length, dtype=torch.float32):
    return make_model_qkv(1, length, length, 2, 2, 8, dtype=dtype)
