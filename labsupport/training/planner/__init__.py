"""Memory of a training step: what exists at each phase, and which sequence fits a limit.

Here are `plan_memory`, `longest`, `what_fits`, and a real step, measured beside its plan; in
`formulas` the parts of memory at each phase, as formulas that are evaluated as they are printed.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from labsupport.attention.implementations import by_name
from labsupport.profiling.memory import MemoryUse, measure_peak_memory
from labsupport.profiling.units import format_bytes, parse_bytes
from labsupport.training.config import DecoderConfig, MemoryOptions
from labsupport.training.decoder import Decoder
from labsupport.training.planner.formulas import Part, StepMemory

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class MemoryPlan:
    """The tensors that exist at each phase of a training step.

    moments: the parts of each phase, by its name, in the order of time.
    limit: bytes that may be used, or None.
    """

    moments: dict[str, list[Part]]
    limit: int | None = None

    @cached_property
    def when(self) -> str:
        """The phase of the peak."""
        return max(self.moments, key=lambda name: _total(self.moments[name]))

    @property
    def parts(self) -> dict[str, Part]:
        """The parts that exist at the peak, by name; each part knows its bytes and its formula."""
        return {part.name: part for part in self.moments[self.when]}

    @property
    def peak_bytes(self) -> int:
        """All of the memory at the peak, weights and optimizer states included."""
        return _total(self.moments[self.when])

    @property
    def fits(self) -> bool:
        """True if the peak is within the limit, or there is none."""
        return self.limit is None or self.peak_bytes <= self.limit

    def frame(self) -> pd.DataFrame:
        """Return a row for each part of each phase: moment, part, bytes, formula, peak (bool)."""
        import pandas as pd

        rows = [
            (name, part.name, part.bytes, part.formula, name == self.when)
            for name, parts in self.moments.items()
            for part in parts
        ]
        return pd.DataFrame(rows, columns=["moment", "part", "bytes", "formula", "peak"])

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
    savings: MemoryOptions | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    limit: int | str | None = None,
) -> MemoryPlan:
    """Predict the memory of one training step of a `Decoder`: forward, backward, AdamW (fused).

    Args:
        config, savings: the decoder's. attention="auto" is taken for a fused backend.
        seqlen, batch: tokens (batch, seqlen), without `cu_seqlens`.
        autocast: dtype of matrix products, by `torch.autocast` around the forward pass; None means
            float32. Weights, their gradients and AdamW's states are float32.
        device: "cpu" or "cuda"; `planner.formulas` says what differs. A plan needs no GPU.
        limit: bytes, or a text such as "16GiB", for `fits`.

    Raises:
        ValueError: sizes below 1, an unknown device; attention "sdpa_math" or "flash_torch",
            which have no plan; a sequence longer than the learned positions.

    >>> plan = plan_memory(DecoderConfig.preset("tiny"), seqlen=4096)
    >>> plan.when
    'loss, backward'
    """
    savings, kind = savings or MemoryOptions(), torch.device(device).type
    if min(seqlen, batch) < 1:
        raise ValueError(f"{seqlen=}, {batch=}: each must be at least 1.")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={kind!r}: there are plans for cpu and cuda.")
    if savings.attention != "auto":
        by_name(savings.attention)
    if savings.attention in ("sdpa_math", "flash_torch"):
        raise ValueError(f"no plan for {savings.attention!r}: plan with 'standard' or 'auto'.")
    if config.positions == "learned" and seqlen > config.max_positions:
        raise ValueError(
            f"seqlen is {seqlen}, but the model has learned {config.max_positions} positions."
        )
    step = StepMemory(config, savings, seqlen, batch, autocast, kind)
    return MemoryPlan(step.phases(), None if limit is None else parse_bytes(limit))


def _total(parts: list[Part]) -> int:
    return sum(part.bytes for part in parts)


# --- from a limit back to lengths -----------------------------------------------------------------


@dataclass(frozen=True)
class MemoryStrategy:
    """A way to save memory, with all earlier ones of the list included."""

    name: str
    savings: MemoryOptions
    autocast: torch.dtype | None = None


_TEXTBOOK, _BF16 = MemoryOptions(attention="standard"), torch.bfloat16
STRATEGIES: tuple[MemoryStrategy, ...] = (
    MemoryStrategy("standard attention, float32", _TEXTBOOK),
    MemoryStrategy("+ bfloat16 autocast", _TEXTBOOK, _BF16),
    MemoryStrategy("+ FlashAttention", MemoryOptions(), _BF16),
    MemoryStrategy("+ loss in chunks", MemoryOptions(loss_chunk=1024), _BF16),
    MemoryStrategy("+ checkpointing", MemoryOptions("auto", True, None, 1024), _BF16),
    MemoryStrategy("+ MLP in chunks", MemoryOptions("auto", True, 1024, 1024), _BF16),
    MemoryStrategy("+ bfloat16 stream", MemoryOptions("auto", True, 1024, 1024, _BF16), _BF16),
    MemoryStrategy(
        "+ heads in groups, host memory",
        MemoryOptions("auto", True, 16_384, 1024, _BF16, head_chunk=2, offload=True),
        _BF16,
    ),
)


def longest(config: DecoderConfig, limit: int | str, *, multiple: int = 256, **options: Any) -> int:
    """Return the longest sequence whose step is within a limit, by the plan.

    Args:
        config: the decoder's shape.
        limit: bytes, or a text such as "16GiB".
        multiple: the length is a multiple of it.
        options: as for `plan_memory`, without seqlen and limit.

    Returns:
        Tokens; 0 if not even `multiple` tokens fit. Learned positions end it at max_positions.
    """
    bound = parse_bytes(limit)
    most = bound // (4 * config.width)  # each token takes an embedding at least
    if config.positions == "learned":
        most = min(most, config.max_positions)
    lengths = range(multiple, most + 1, multiple)

    def peak(seqlen: int) -> int:
        return plan_memory(config, seqlen=seqlen, **options).peak_bytes

    return multiple * bisect_right(lengths, bound, key=peak)


def what_fits(
    config: DecoderConfig, limit: int | str, *, seqlen: int = 8192, **options: Any
) -> pd.DataFrame:
    """Return the longest sequence with each of `STRATEGIES`, and the peak of a step of `seqlen`.

    `options` are as for `plan_memory`, without what the remedies decide.

    Returns:
        remedy, longest (tokens), peak_bytes and when (of `seqlen` tokens), fits.

    >>> table = what_fits(DecoderConfig.preset("gpt2-small"), "16GiB", device="cuda")
    >>> table.longest.is_monotonic_increasing
    True
    """
    import pandas as pd

    rows = []
    for strategy in STRATEGIES:
        chosen: dict[str, Any] = {"savings": strategy.savings, "autocast": strategy.autocast}
        chosen |= options
        plan = plan_memory(config, seqlen=seqlen, limit=limit, **chosen)
        most = longest(config, limit, **chosen)
        rows.append((strategy.name, most, plan.peak_bytes, plan.when, plan.fits))
    return pd.DataFrame(rows, columns=["remedy", "longest", "peak_bytes", "when", "fits"])


# --- a real step ----------------------------------------------------------------------------------


MakeModel = Callable[[DecoderConfig, MemoryStrategy, int], nn.Module]


@dataclass(frozen=True)
class TrainingStep:
    """A model with its optimizer, ready to do steps on the same random tokens.

    run: does one step; returns its loss. warm_up: the same with the first tokens only (on a GPU as
        many as take the same kernels).
    standing_bytes: weights and AdamW's states, which are there between steps.
    """

    run: Callable[[], float]
    warm_up: Callable[[], float]
    standing_bytes: int


def training_step(
    config: DecoderConfig,
    strategy: MemoryStrategy,
    seqlen: int,
    device: torch.device,
    *,
    batch: int = 1,
    accumulation: int = 1,
    make_model: MakeModel | None = None,
) -> TrainingStep:
    """Make a training step on `device`: forward, backward, AdamW; `accumulation` micro-batches.

    `make_model(config, strategy, seqlen)` makes another model than the `Decoder`; called with
    tokens and labels, it returns its loss.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        if make_model is None:
            model: nn.Module = Decoder(config, strategy.savings)
        else:
            model = make_model(config, strategy, seqlen)
        tokens = torch.randint(config.vocab_size, (batch, seqlen))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for weight in model.parameters():  # the states are made by a first step
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dtype = strategy.autocast

    def run(tokens: Tensor) -> float:
        labels, loss = tokens.roll(-1, dims=1), torch.zeros(())
        try:
            for _ in range(accumulation):
                with torch.autocast(device.type, dtype, enabled=dtype is not None):
                    loss = model(tokens, labels)
                loss.backward()
                loss = loss.detach()  # its graph goes before the next forward
            optimizer.step()
            return float(loss)
        finally:
            optimizer.zero_grad(set_to_none=True)

    standing = 3 * sum(weight.nbytes for weight in model.parameters())
    first = tokens[:, : 16_384 if device.type == "cuda" else 128]
    return TrainingStep(partial(run, tokens), partial(run, first), standing)


def measure_step(
    config: DecoderConfig,
    *,
    seqlen: int,
    savings: MemoryOptions | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> MemoryUse:
    """Measure the peak of one training step on random tokens, everything it needs included.

    Weights, AdamW's states, tokens and the step itself are made inside of the measurement. So
    `peak_bytes` is what `plan_memory` predicts for the same arguments. `options` are batch and
    accumulation, which a plan does not know: gradients then exist during all of the step.

    Raises:
        torch.OutOfMemoryError: the step does not fit.

    >>> config = DecoderConfig.preset("tiny")
    >>> measured, planned = measure_step(config, seqlen=256), plan_memory(config, seqlen=256)
    >>> abs(measured.peak_bytes / planned.peak_bytes - 1) < 0.001
    True
    """
    place, strategy = torch.device(device), MemoryStrategy("", savings or MemoryOptions(), autocast)
    try:
        # Without a warm-up: cuBLAS takes its workspaces within the measurement, as planned.
        return measure_peak_memory(
            lambda: training_step(config, strategy, seqlen, place, **options).run(),
            device=place, warmup=0,
        )  # fmt: skip
    finally:
        if place.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
