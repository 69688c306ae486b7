"""One case, one runner: how every program here turns measurements into a table.

A program lists its cases; the runner measures them one after the other, frees memory in between,
and turns a case that does not run into a row with a status and a reason, as `run_grid` does:

    ok, unsupported, out of memory, failed
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from labsupport.attention.flash_triton import mode
from labsupport.profiling.benchmark import refusal
from labsupport.profiling.provenance import provenance

if TYPE_CHECKING:
    import argparse

    import pandas as pd

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        row: the columns that identify it; they stand in every row of it.
        measure: returns the measured columns, or a list of them for several rows (of calls that
            are timed in turns, say).
    """

    row: Row
    measure: Callable[[], Row | Sequence[Row]]


def run(
    cases: Iterable[Case], device: torch.device, *, progress: bool = True, **about: Any
) -> pd.DataFrame:
    """Measure the cases in their order.

    Args:
        cases: what to measure; a generator may decide as it goes.
        device: where, for the provenance and for the memory that is freed between two cases.
        progress: show a tqdm bar.
        about: further entries of the provenance.

    Returns:
        One row a case, or several: the case's columns, status, reason, the measured columns.
        Provenance in `.attrs["provenance"]`. Interrupted from the keyboard, the rows so far, with
        `interrupted: true` there.
    """
    import pandas as pd
    from tqdm.auto import tqdm

    record = provenance(device, **about)
    rows: list[dict[str, Any]] = []
    try:
        for case in tqdm(cases, disable=not progress, unit="case", leave=False):
            rows += _measured(case)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    except KeyboardInterrupt:
        record["interrupted"] = True
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = record
    return table


def _measured(case: Case) -> list[dict[str, Any]]:
    try:
        found = case.measure()
    except Exception as error:
        return [{**case.row, **refusal(error)}]
    found = [found] if isinstance(found, Mapping) else found
    return [{**case.row, "status": "ok", "reason": "", **row} for row in found]


def not_measured(table: pd.DataFrame, *columns: str) -> list[str]:
    """A line for each reason why rows of a table were not measured, by these columns."""
    others = table[table.status != "ok"].groupby([*columns, "status", "reason"], sort=False)
    return [": ".join(map(str, key)) + f" ({len(group)})" for key, group in others]


def check_triton(options: argparse.Namespace) -> None:
    """End the program where Triton's kernels cannot run, or interpreted times would be saved."""
    if reason := mode.missing():
        raise SystemExit(reason)
    if mode.interpreted() and options.save:
        raise SystemExit("the kernels are interpreted here: such times are not worth keeping")


def one_line(error: BaseException) -> str:
    """The message of an error, without line breaks."""
    return " ".join(str(error).split())


def names(text: str) -> list[str]:
    """'a,b' as ['a', 'b'], for argparse."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> list[int]:
    """'1,2' as [1, 2], for argparse."""
    return [int(part) for part in names(text)]
