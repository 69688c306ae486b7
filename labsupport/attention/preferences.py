"""Orders of backends by measured speed: what `backend="auto"` prefers on a Hopper GPU.

`python -m benchmarks choose` prints the rows of its card as they stand here; the whole call counts,
from Python on, and with gradients the backward too. A row is for calls with or without gradients,
head_dim up to 64 or more, and a causal mask (or a window) or none. Its first order is for small
calls, which launching bounds; the others are for 512, 1,024, ... 16,384 keys.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from labsupport.attention.call import AttentionCall

NAMES = {"F": "fa4", "G": "flash_gluon", "C": "sdpa_cudnn", "S": "sdpa_flash"}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
SMALL = 2**35  # floating-point operations of a forward without a mask

# card: {(gradients, head_dim above 64, causal or window): orders}
ORDERS: dict[str, dict[tuple[bool, bool, bool], str]] = {
    "H100": {
        (False, False, False): "SCGF CGFS CGFS FGCS FGCS FGCS FGCS",
        (False, False, True): "SCGF CGFS GCFS GCFS FGCS FGCS FGCS",
        (False, True, False): "SCGF CGFS CFGS FCGS FCGS FCGS FCGS",
        (False, True, True): "SCGF CGSF CGFS GFCS FGCS FGCS FGCS",
        (True, False, False): "SCFG CFSG FGCS FGCS FGCS FGCS FGCS",
        (True, False, True): "SCFG CFSG FCGS FGCS FGCS FGCS FGCS",
        (True, True, False): "SCFG CFSG FGCS FGCS FGCS FGCS FGCS",
        (True, True, True): "SCFG CSFG FCGS FGCS FGCS FGCS FGCS",
    },
}


def preferred(call: AttentionCall) -> list[str]:
    """Return the fastest backends for a call, the best first; none where they weren't measured."""
    if not call.q.is_cuda or (card := _card(call.q.device)) not in ORDERS:
        return []
    limited = call.causal or call.windowed
    orders = ORDERS[card][call.needs_grad, call.head_dim > 64, limited].split()
    # Packed sequences count as one: they are rarely short, and their lengths are on the GPU.
    keys = call.k.shape[-3]
    if 4 * call.q.numel() * keys < SMALL:
        return [NAMES[letter] for letter in orders[0]]
    nearest = round(math.log2(max(keys, 1) / LENGTHS[0]))
    return [NAMES[letter] for letter in orders[1:][min(max(nearest, 0), len(LENGTHS) - 1)]]


@cache
def _card(device: torch.device) -> str:
    """Return the measured card that is most like this one."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return ""
    return "H200" if "H200" in torch.cuda.get_device_name(device) else "H100"
