"""Limits of each dtype, and the range of a tensor.

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

from labsupport.attention.implementations import short as short

BOTTOM = 8


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to `dtype` within its normal range."""
    return torch.finfo(dtype).eps / 2


def overflow_threshold(dtype: torch.dtype) -> float:
    """Return the magnitude from which rounding to `dtype` gives infinity: 65,520 for float16."""
    info = torch.finfo(dtype)
    return info.max * (1 + unit_roundoff(dtype) / (2 - info.eps))


@dataclass(frozen=True)
class Range:
    """Magnitudes and counts of the entries of one or several tensors.

    Attributes:
        largest, smallest: the largest and the smallest non-zero finite magnitude; 0 if there is
            none.
        nan, inf, zero: number of such entries.
        minus_inf: number of -inf; they are among `inf`.
        bottom: number of non-zero entries below `BOTTOM` times the dtype's smallest subnormal: 1 to
            3 bits left.
        entries: number of all entries.
    """

    largest: float
    smallest: float
    nan: int
    inf: int
    minus_inf: int
    bottom: int
    zero: int
    entries: int

    @property
    def finite(self) -> bool:
        """True if there is no NaN and no infinity."""
        return not self.nan and not self.inf

    @property
    def masked(self) -> bool:
        """True if there is -inf, but neither NaN nor +inf, as in scores after a mask."""
        return 0 < self.inf == self.minus_inf and not self.nan

    @property
    def nonfinite(self) -> str:
        """Count of the entries that are not finite: "1 NaN and 2 -inf of 8 entries"."""
        counts = {"NaN": self.nan, "+inf": self.inf - self.minus_inf, "-inf": self.minus_inf}
        listing = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        return f"{listing} of {self.entries} entries"


def range_of(*tensors: Tensor) -> Range:
    """Measure floating tensors of any shapes, taken together; waits for their device."""
    return as_range([range_tensor(tensor) for tensor in tensors])


def as_range(numbers: list[Tensor]) -> Range:
    """Make one `Range` from the `range_tensor` of one or several tensors."""
    columns = zip(*(each.tolist() for each in numbers), strict=True)
    largest, smallest, *counts = map(list, columns)
    low = min((x for x in smallest if x), default=0.0)
    return Range(max(largest), low, *(int(sum(count)) for count in counts))


def range_tensor(tensor: Tensor) -> Tensor:
    """Return the fields of `Range` as a float64 tensor on the device.

    Float64 holds every magnitude of the other dtypes and every count exactly.
    """
    with torch.no_grad():
        x = tensor.detach().abs()
        info = torch.finfo(x.dtype)
        if x.numel() == 0:
            return torch.zeros(8, dtype=torch.float64, device=x.device)
        finite = x.isfinite()
        nonzero = finite & (x > 0)
        smallest = torch.where(nonzero, x, torch.inf).amin().double()
        numbers = [
            torch.where(finite, x, 0).amax(),
            smallest.masked_fill(~nonzero.any(), 0.0),
            x.isnan().sum(),
            x.isinf().sum(),
            tensor.detach().isneginf().sum(),
            (nonzero & (x < BOTTOM * info.smallest_normal * info.eps)).sum(),
            (x == 0).sum(),
            torch.full((), x.numel(), dtype=torch.float64, device=x.device),
        ]
        return torch.stack([number.double() for number in numbers])
