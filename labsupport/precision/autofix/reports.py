"""What was done to the inputs of a call, and how it is said: once per cause."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

import torch

from labsupport.precision.dtypes import short


class PrecisionWarning(UserWarning):
    """Inputs were cast, or their numbers are such that the result deserves a second look.

    Each cause is reported once in a process; `forget_warnings` starts anew.
    """


@dataclass(frozen=True)
class Cast:
    """One input that was cast."""

    name: str
    before: torch.dtype
    after: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {short(self.before)} -> {short(self.after)}"


@dataclass(frozen=True)
class PrecisionReport:
    """What was done to the inputs of one call, why, and what it costs.

    Attributes:
        backend: the implementation that the inputs were made to fit.
        compute_dtype: the dtype of q, k and v for it.
        out_dtype: the dtype of the result.
        casts: the inputs that were cast; empty if none had to be.
        why: the reason for `compute_dtype`; empty if nothing was cast.
        error_bound: the maximum error of the output against exact arithmetic on the inputs as
            given, estimated from above by a sample of the queries (`cost.sampled_error`); None
            where it was not asked for and every cast was exact.
        score_bound: no scaled score is larger in magnitude.
        cautions: what else the inputs' numbers give reason to look at.
    """

    backend: str
    compute_dtype: torch.dtype
    out_dtype: torch.dtype
    casts: tuple[Cast, ...] = ()
    why: str = ""
    error_bound: float | None = None
    score_bound: float = 0.0
    cautions: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Every cast kept every digit."""
        return all(torch.promote_types(c.before, c.after) == c.after for c in self.casts)

    def __str__(self) -> str:
        done = ", ".join(map(str, self.casts)) or "nothing was cast"
        lines = [f"{done} for {self.backend}; result in {short(self.out_dtype)}"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.casts and self.exact:
            lines.append("  cost: none, the wider dtype holds every number of the narrower one")
        if self.error_bound is not None:
            lines.append(f"  error of the output: at most about {self.error_bound:.1e}")
        return "\n".join([*lines, *(f"  caution: {text}" for text in self.cautions)])


_said: set[tuple[object, ...]] = set()


def say(report: PrecisionReport, stacklevel: int) -> None:
    """Warn of what was cast and of each caution, once per cause, in the name of a caller."""
    if report.casts and is_new(report):
        _warn_once(_cause(report), str(report).split("\n  caution")[0], stacklevel)
    for text in report.cautions:
        kind = "near-ties" if "near-ties" in text else text.split(" holds")[0] + " not finite"
        _warn_once((kind, report.compute_dtype, report.backend), text, stacklevel)


def is_new(report: PrecisionReport) -> bool:
    """Casts like these, for the same reason, have not been reported yet."""
    return _cause(report) not in _said


def forget_warnings() -> None:
    """Report each cause anew."""
    _said.clear()


def _cause(report: PrecisionReport) -> tuple[object, ...]:
    # The reason without its figures: "v reaches 7e4" and "v reaches 8e4" are one cause.
    why = re.sub(r"[-+.e\d]*\d", "", report.why)
    return ("cast", report.backend, why, *map(str, report.casts))


def _warn_once(cause: tuple[object, ...], message: str, stacklevel: int) -> None:
    if cause not in _said:
        _said.add(cause)
        warnings.warn(message, PrecisionWarning, stacklevel=stacklevel + 2)
