"""Does training with FlashAttention follow training with textbook attention?

Two implementations round differently, and training lets differences grow. Three questions still
have answers: are the first step's gradients as near to the exact ones as the textbook's? How long
do the losses stay together? And do the curves differ by more than those of two seeds? `python -m
benchmarks agreement` records the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from labsupport.attention.accuracy import ErrorReport, compare_with_oracle
from labsupport.profiling.timing import resolve_device
from labsupport.training.config import DecoderConfig, MemoryOptions, TrainConfig
from labsupport.training.data import tensors
from labsupport.training.decoder import Decoder
from labsupport.training.train import train

if TYPE_CHECKING:
    import pandas as pd

Batches = Callable[[int], Iterable[Any]]
SETTINGS = TrainConfig(steps=200, learning_rate=1e-3, warmup_steps=20)


@dataclass(frozen=True)
class Course:
    """One training run: which attention, from which seed."""

    attention: str
    seed: int


def gradient_errors(
    config: DecoderConfig,
    batches: Batches,
    attention: str,
    *,
    device: torch.device | str | None = None,
) -> dict[str, ErrorReport]:
    """Judge the first step's gradients of each parameter by flash-attn's rule.

    The oracle is the whole model in float64; the yardstick is the same float32 model with textbook
    attention. All three have the same weights, from seed 0, and see the tokens of step 0.

    Returns:
        an `ErrorReport` for each parameter, by name. Errors and what is allowed are relative to the
        parameter's largest exact gradient: gradients of a mean loss are small numbers, which the
        rule's floor of 1e-5 would let pass whatever they are.
    """
    place = resolve_device(device)

    def gradients(attention: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model: Any = Decoder(config, MemoryOptions(attention=attention)).to(place, dtype)
        for batch in batches(0):
            inputs = {name: value.to(place) for name, value in tensors(batch).items()}
            model(**inputs).backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    exact = gradients("standard", torch.float64)
    textbook = gradients("standard", torch.float32)
    judged = gradients(attention, torch.float32)
    scale = {name: gradient.abs().max().clamp(min=1e-300) for name, gradient in exact.items()}
    return {
        name: compare_with_oracle(
            *(each[name] / scale[name] for each in (judged, textbook, exact)), gradient=True
        )
        for name in exact
    }


def training_courses(
    config: DecoderConfig,
    batches: Callable[[int], Batches],
    courses: Sequence[Course],
    settings: TrainConfig = SETTINGS,
    *,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Train the same model several times, with equal settings; `batches` maps a seed to batches.

    Returns:
        backend, seed, step, loss, grad_norm, one row a step of each run. Provenance in `.attrs`.
    """
    import pandas as pd

    from labsupport.profiling.provenance import provenance

    place = resolve_device(device)
    tables = []
    for course in courses:
        torch.manual_seed(course.seed)
        model = Decoder(config, MemoryOptions(attention=course.attention)).to(place)
        own = replace(settings, seed=course.seed)
        history = train(model, batches(course.seed), own, progress=progress)
        table = history.frame()[["step", "loss", "grad_norm"]]
        tables.append(table.assign(backend=course.attention, seed=course.seed))
    table = pd.concat(tables, ignore_index=True)
    rates = {"learning_rate": settings.learning_rate, "warmup_steps": settings.warmup_steps}
    table.attrs["provenance"] = provenance(place, parameters=config.parameters, **rates)
    return table


def together(table: pd.DataFrame, steps: int = 20) -> float:
    """Return the largest difference of two attentions' losses, of equal seed, in the first steps.

    Raises:
        ValueError: no seed has two attentions.
    """
    first = table[table.step < steps]
    wide = first.pivot_table(index=["seed", "step"], columns="backend", values="loss").dropna()
    if wide.shape[1] < 2 or wide.empty:
        raise ValueError("losses of two attentions with the same seed are needed")
    return float((wide.max(axis=1) - wide.min(axis=1)).max())
