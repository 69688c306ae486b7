"""Orders of backends by measured speed: what `backend="auto"` prefers on a Hopper GPU.

`python -m benchmarks choose` prints the rows as they stand here; the whole call counts,
from Python on, and with gradients the backward too. A row is for calls with or without gradients,
head_dim up to 64 or more, and a causal mask (or a window) or none. Its first order is for small
calls, which launching bounds; the others are for 512, 1,024, ... 16,384 keys.
"""

from __future__ import annotations

import math

import torch

from labsupport.attention.call import AttentionCall

NAMES = {"F": "fa4", "G": "flash_gluon", "C": "sdpa_cudnn", "S": "sdpa_flash"}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
SMALL = 2**35  # floating-point operations of a forward without a mask

# (gradients, head_dim above 64, causal or window): orders, measured on an H100 and an H200
# (`choose-h100`, `choose-h200`). Where the two differ, mostly because one's host is twice as fast,
# the order is the one that loses least on either.
ORDERS = {
    (False, False, False): "CSGF CGFS CGFS FGCS FGCS FGCS FGCS",
    (False, False, True): "CSGF CGFS GCFS GCFS FGCS FGCS FGCS",
    (False, True, False): "CSGF CGFS CFGS FCGS FCGS FCGS FCGS",
    (False, True, True): "CSGF CGSF CGFS GFCS FGCS FGCS FGCS",
    (True, False, False): "SCFG CFSG FGCS FGCS FGCS FGCS FGCS",
    (True, False, True): "SCFG CFSG FCGS FGCS FGCS FGCS FGCS",
    (True, True, False): "SCFG CFSG FGCS FGCS FGCS FGCS FGCS",
    (True, True, True): "SCFG CSFG CFGS FGCS FGCS FGCS FGCS",
}


def preferred(call: AttentionCall) -> list[str]:
    """Return the backends to try first, the fastest first: of square calls on a Hopper GPU."""
    hopper = call.q.is_cuda and torch.cuda.get_device_capability(call.q.device) == (9, 0)
    square = call.q.shape[-3] == call.k.shape[-3]
    return fastest(call) if hopper and square else []


def fastest(call: AttentionCall) -> list[str]:
    """Return the order for a call; packed sequences count as one, since a GPU has their lengths."""
    limited = call.causal or call.windowed
    small, *by_length = ORDERS[call.needs_grad, call.head_dim > 64, limited].split()
    keys = call.k.shape[-3]
    if 4 * call.q.numel() * keys < SMALL:
        return [NAMES[letter] for letter in small]
    nearest = round(math.log2(keys / LENGTHS[0]))
    return [NAMES[letter] for letter in by_length[min(max(nearest, 0), len(LENGTHS) - 1)]]
