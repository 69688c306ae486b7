"""What each dtype can hold, and what a tensor holds.

    dtype      largest    smallest normal   smallest subnormal   unit roundoff u
    float32    3.4e38     1.2e-38           1.4e-45              2^-24 = 6.0e-8
    float16    65,504     6.1e-5            6.0e-8               2^-11 = 4.9e-4
    bfloat16   3.4e38     1.2e-38           9.2e-41              2^-8  = 3.9e-3

u is the largest relative error of rounding a number within the normal range to the nearest one that
the dtype holds: half of `torch.finfo(dtype).eps`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labsupport.attention.registry import short as short


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to `dtype`, where it neither over- nor underflows."""
    return torch.finfo(dtype).eps / 2


def overflow_threshold(dtype: torch.dtype) -> float:
    """The magnitude from which rounding to `dtype` gives infinity: 65,520 for float16."""
    info = torch.finfo(dtype)
    return info.max * (1 + unit_roundoff(dtype) / (2 - info.eps))


BOTTOM = 8


@dataclass(frozen=True)
class Range:
    """What a tensor holds.

    Attributes:
        largest, smallest: the largest and the smallest non-zero finite magnitude; 0 if there is
            none.
        nan, inf, zero: how many entries are so.
        minus_inf: how many of the infinite ones are -inf.
        subnormal: how many are below the dtype's smallest normal magnitude, and not 0.
        bottom: how many of those are below `BOTTOM` times its smallest subnormal: 1 to 3 bits left.
        entries: how many there are in all.
    """

    largest: float
    smallest: float
    nan: int
    inf: int
    minus_inf: int
    subnormal: int
    bottom: int
    zero: int
    entries: int

    @property
    def finite(self) -> bool:
        """No NaN and no infinity."""
        return not self.nan and not self.inf

    @property
    def masked(self) -> bool:
        """Holds -inf, and neither NaN nor +inf: so look scores after a mask."""
        return 0 < self.inf == self.minus_inf and not self.nan

    @property
    def nonfinite(self) -> str:
        """What is not finite, counted: "1 NaN and 2 -inf"."""
        counts = {"NaN": self.nan, "+inf": self.inf - self.minus_inf, "-inf": self.minus_inf}
        return " and ".join(f"{count} {what}" for what, count in counts.items() if count)


def range_of(tensor: Tensor) -> Range:
    """Measure a floating tensor of any shape; waits for the device once."""
    values = range_tensor(tensor).tolist()
    return as_range(values, tensor.numel())


def as_range(values: list[float], entries: int) -> Range:
    """The numbers of `range_tensor`, read from the device, as a `Range`."""
    largest, smallest, *counts = values
    nan, inf, minus_inf, subnormal, bottom, zero = (int(count) for count in counts)
    return Range(largest, smallest, nan, inf, minus_inf, subnormal, bottom, zero, entries)


def range_tensor(tensor: Tensor) -> Tensor:
    """The numbers of `Range` but the last, as a float64 tensor on the device: waits for nothing.

    Float64 holds every magnitude of the other dtypes and every count exactly.
    """
    with torch.no_grad():
        x = tensor.detach().abs()
        info = torch.finfo(x.dtype)
        bottom = BOTTOM * info.smallest_normal * info.eps
        finite = x.isfinite()
        nonzero = finite & (x > 0)
        if x.numel() == 0:
            return torch.zeros(8, dtype=torch.float64, device=x.device)
        none = nonzero.any().logical_not()
        smallest = torch.where(nonzero, x, torch.inf).amin().double().masked_fill(none, 0.0)
        return torch.stack(
            [
                torch.where(finite, x, 0).amax().double(),
                smallest,
                x.isnan().sum().double(),
                x.isinf().sum().double(),
                tensor.detach().isneginf().sum().double(),
                (nonzero & (x < info.smallest_normal)).sum().double(),
                (nonzero & (x < bottom)).sum().double(),
                (x == 0).sum().double(),
            ]
        )
