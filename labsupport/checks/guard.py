"""Outputs with room after their end, to detect a store without a mask."""

import torch
from torch import Tensor

ROOM = 4096  # elements; a program that runs beyond the end writes less


def guarded_zeros(*shape: int, like: Tensor) -> Tensor:
    """Return zeros of this shape, in the dtype and on the device of `like`, with room after."""
    size = torch.Size(shape).numel()
    whole = like.new_zeros(size + ROOM)
    whole[size:] = torch.nan
    return whole[:size].view(shape)


def check_guard(*outputs: Tensor) -> None:
    """Refuse outputs of `guarded_zeros` if something was written beyond their end.

    Looks on a CPU only: on a GPU it would wait for the kernel, and cost time.

    Raises:
        IndexError: a store went beyond the end.
    """
    for one in outputs:
        if one.device.type == "cpu" and not _room(one).isnan().all():
            raise IndexError(
                "a store wrote beyond the end of its tensor: on a GPU it overwrites other data. "
                "Mask each tl.store, as each tl.load"
            )


def _room(output: Tensor) -> Tensor:
    return output.as_strided((ROOM,), (1,), output.storage_offset() + output.numel())
