"""Do all ranks of a ring do the same? Asked in one small message each, before the ring begins.

A rank that raises alone leaves the others waiting for its keys. So a rank that refuses its call
takes part all the same, and says so: then all of them raise.
"""

from __future__ import annotations

import struct

import torch
import torch.distributed as dist

from labsupport.attention.inputs import AttentionInputError
from labsupport.attention.registry import FLOAT_DTYPES, AttentionCall
from labsupport.distributed.ring.kernels import KERNELS
from labsupport.distributed.ring.plan import Plan
from labsupport.distributed.ring.transport import Ring

NAMES = (
    *("batch", "seqlen_local", "heads", "head_dim", "kv_heads", "dtype", "left", "right"),
    *("zigzag", "alibi_slopes", "softmax_scale", "kernel", "gradients wanted"),
)
_NAME_OF_KERNEL = [kernel.name for kernel in KERNELS]
_REFUSED = [1] + [0] * len(NAMES)


def check_same(ring: Ring, call: AttentionCall, plan: Plan, kernel: str) -> None:
    """Raise AttentionInputError, on all ranks, if one of them does something else or refuses."""
    mine = [
        *(0, *call.q.shape, call.kv_heads, FLOAT_DTYPES.index(call.q.dtype)),
        *(-1 if side is None else side for side in (plan.left, plan.right)),
        *(int(plan.zigzag), int(plan.alibi), struct.unpack("<q", struct.pack("<d", call.scale))[0]),
        *(_NAME_OF_KERNEL.index(kernel), int(call.needs_grad)),
    ]
    by_rank = _told(mine, call.q.device, ring.group)
    refusing = [str(rank) for rank, (refused, *_) in enumerate(by_rank) if refused]
    if refusing:
        raise AttentionInputError(
            f"rank {', '.join(refusing)} has refused this call of the ring, so no rank goes on; "
            f"what it raised says why. This rank's call has "
            f"{', '.join(f'{n} {_readable(n, x)}' for n, x in zip(NAMES, mine[1:], strict=True))}."
        )
    for name, *values in zip(NAMES, *(numbers for _, *numbers in by_rank), strict=True):
        if len(set(values)) > 1:
            hint = ""
            if name == "seqlen_local":
                hint = " Pad the sequence to a multiple of the number of ranks."
            raise AttentionInputError(
                f"the ranks of a ring must agree, but {name} on ranks 0 to {ring.size - 1} is "
                f"{', '.join(_readable(name, value) for value in values)}.{hint}"
            )


def say_refused(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """This rank's part in `check_same` when its own call is refused: the others wait for it."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    if dist.get_rank(group) >= 0 and dist.get_world_size(group) > 1:
        _told(_REFUSED, device, group)


def _told(
    mine: list[int], device: torch.device, group: dist.ProcessGroup | None
) -> list[list[int]]:
    """The numbers of every rank, on every rank."""
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return torch.stack(gathered).tolist()


def _readable(name: str, value: int) -> str:
    if name == "softmax_scale":
        return str(struct.unpack("<d", struct.pack("<q", value))[0])
    if name == "dtype":
        return str(FLOAT_DTYPES[value])
    if name == "kernel":
        return _NAME_OF_KERNEL[value]
    if name in ("zigzag", "alibi_slopes", "gradients wanted"):
        return str(bool(value))
    return str(value)
