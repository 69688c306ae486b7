"""Predict a training step's memory, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import torch

from labsupport.attention.implementations import by_name
from labsupport.profiling.units import format_bytes
from labsupport.training.model import DecoderConfig, Savings
from labsupport.training.planner.moments import STATES, WEIGHTS, Moments, moments
from labsupport.training.planner.shape import Part, Shape
from labsupport.training.saving.limit import parse_bytes

if TYPE_CHECKING:
    import pandas as pd

Optimizer = Literal["auto", "loop", "foreach", "fused"]


@dataclass(frozen=True)
class MemoryPlan:
    """What exists at each moment of a training step.

    moments: the parts of each moment, by its name, in the order of time.
    limit: bytes that may be used, or None.
    """

    moments: Moments
    limit: int | None = None

    @cached_property
    def when(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda name: _total(self.moments[name]))

    @property
    def parts(self) -> dict[str, Part]:
        """What exists at the peak, by name; each part knows its bytes and its formula."""
        return {part.name: part for part in self.moments[self.when]}

    @property
    def peak_bytes(self) -> int:
        """All of the memory at the peak, weights and optimizer states included."""
        return _total(self.moments[self.when])

    @property
    def step_bytes(self) -> int:
        """What the step adds at its peak to the weights and states that are there before it."""
        kept = (WEIGHTS, STATES)
        return self.peak_bytes - sum(p.bytes for p in self.parts.values() if p.name in kept)

    @property
    def fits(self) -> bool:
        """Whether the peak keeps to the limit; True without one."""
        return self.limit is None or self.peak_bytes <= self.limit

    def frame(self) -> pd.DataFrame:
        """One row for each part of each moment: moment, part, bytes, formula, peak (True/False)."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "moment": name,
                    "part": part.name,
                    "bytes": part.bytes,
                    "formula": part.formula,
                    "peak": name == self.when,
                }
                for name, parts in self.moments.items()
                for part in parts
            ]
        )

    def __str__(self) -> str:
        head = f"peak {format_bytes(self.peak_bytes)}: {self.when}"
        if self.limit is not None:
            head += f" ({'fits' if self.fits else 'does not fit'} {format_bytes(self.limit)})"
        parts = sorted(self.parts.values(), key=lambda part: -part.bytes)
        rows = [f"{format_bytes(p.bytes):>11}  {p.name:<28}{p.formula}" for p in parts]
        others = [
            f"{format_bytes(_total(parts)):>11}  {name}"
            for name, parts in self.moments.items()
            if name != self.when
        ]
        return "\n".join([head, *rows, "other moments", *others])


def plan_memory(
    config: DecoderConfig,
    *,
    seqlen: int,
    batch: int = 1,
    savings: Savings | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    optimizer: Optimizer | None = "auto",
    accumulation: int = 1,
    limit: int | str | None = None,
) -> MemoryPlan:
    """The memory of one training step of a `Decoder`: forward, backward, AdamW.

    Args:
        config, savings: the decoder's. attention="auto" is taken for a fused backend.
        seqlen, batch: tokens (batch, seqlen), without `cu_seqlens`.
        autocast: dtype of matrix products, by `torch.autocast` around the forward pass; None means
            float32. Weights, their gradients and AdamW's states are float32.
        device: "cpu" or "cuda"; `planner.devices` says what differs. A plan needs no GPU.
        optimizer: how AdamW works: tensor by tensor ("loop"), all together ("foreach"), or in one
            kernel ("fused", and "auto", as in `train`). None: no optimizer, only forward and
            backward.
        accumulation: micro-batches of a step. From the second one on, gradients exist always.
        limit: bytes, or a text such as "16GiB", for `fits`.

    Raises:
        ValueError: sizes below 1, an unknown optimizer, a device or an autocast dtype that is not
            planned for; attention of which it is not known what it keeps (sdpa_math); a
            sequence that is longer than the learned positions.

    >>> plan = plan_memory(DecoderConfig.preset("tiny"), seqlen=4096)
    >>> plan.when
    'loss, backward'
    """
    savings = savings or Savings()
    for name, value in (("seqlen", seqlen), ("batch", batch), ("accumulation", accumulation)):
        if value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1.")
    kind = torch.device(device).type
    for name, value, known in (
        ("optimizer", optimizer, (*get_args(Optimizer), None)),
        ("device", kind, ("cpu", "cuda")),
        ("autocast", autocast, (None, torch.bfloat16, torch.float16)),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value}, but must be one of {known}.")
    if savings.attention != "auto":
        by_name(savings.attention)
    if savings.attention == "sdpa_math":
        raise ValueError(
            "what sdpa_math keeps depends on PyTorch's version: plan with 'standard', which is "
            "the same mathematics."
        )
    if config.positions == "learned" and seqlen > config.max_positions:
        raise ValueError(
            f"seqlen is {seqlen}, but the model has learned {config.max_positions} positions."
        )
    step = Shape(config, savings, seqlen, batch, autocast, kind, optimizer, accumulation)
    return MemoryPlan(moments(step), None if limit is None else parse_bytes(limit))


def _total(parts: list[Part]) -> int:
    return sum(part.bytes for part in parts)
