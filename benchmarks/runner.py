"""One case, one runner: how every program here turns measurements into a table.

A program lists its cases; the runner measures them one after the other, frees memory in between,
and turns a case that does not run into a row with a status and a reason, as `run_grid` does:

    ok, unsupported, out of memory, failed
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from labsupport.attention.kernels import mode
from labsupport.profiling.benchmark import refusal
from labsupport.profiling.provenance import command_line, provenance
from labsupport.profiling.runs import runs_dir, save_run
from labsupport.training.sizes import parse_tokens

if TYPE_CHECKING:
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
    cases: Iterable[Case],
    device: torch.device,
    *,
    progress: bool = True,
    on_rows: Callable[[pd.DataFrame], Any] | None = None,
    **about: Any,
) -> pd.DataFrame:
    """Measure the cases in their order.

    Args:
        cases: what to measure; a generator may decide as it goes.
        device: where, for the provenance and for the memory that is freed between two cases.
        progress: show a tqdm bar.
        on_rows: is given the table so far after each case.
        about: further entries of the provenance.

    Returns:
        One row a case, or several: the case's columns, status, reason, the measured columns.
        Provenance in `.attrs["provenance"]`. Interrupted from the keyboard, the rows so far, with
        `interrupted: true` there.
    """
    import pandas as pd
    from tqdm.auto import tqdm

    record = provenance(device, command=_command(), **about)
    rows: list[dict[str, Any]] = []

    def so_far() -> pd.DataFrame:
        table = pd.DataFrame(rows)
        table.attrs["provenance"] = record
        return table

    try:
        for case in tqdm(cases, disable=not progress, unit="case", leave=False):
            rows += _measured(case)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if on_rows is not None:
                on_rows(so_far())
    except KeyboardInterrupt:
        record["interrupted"] = True
    return so_far()


def keep_rows(options: argparse.Namespace) -> Callable[[pd.DataFrame], Any] | None:
    """Return an `on_rows` that saves to --save, if given: for a program that a case may end.

    Raises:
        SystemExit: the name is taken, and there is no --overwrite.
    """
    if not options.save:
        return None
    if not options.overwrite and (runs_dir() / options.save / "results.csv").exists():
        raise SystemExit(f"there is a run {options.save!r} already: --overwrite replaces it")
    options.overwrite = True  # from the first row on, the run of that name is this one
    return lambda table: save_run(table, options.save, overwrite=True)


def _command() -> str:
    """Return the command line, with torchrun's part."""
    command, world = command_line(), os.environ.get("LOCAL_WORLD_SIZE")
    if world is None:
        return command
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    starter = "torchrun" if nodes == "1" else f"torchrun --nnodes {nodes}"
    return command.replace("python", f"{starter} --nproc-per-node {world}", 1)


def _measured(case: Case) -> list[dict[str, Any]]:
    try:
        found = case.measure()
    except Exception as error:
        return [{**case.row, **refusal(error)}]
    found = [found] if isinstance(found, Mapping) else found
    return [{**case.row, "status": "ok", "reason": "", **row} for row in found]


def not_measured(table: pd.DataFrame, *columns: str) -> list[str]:
    """Return a line for each reason why rows of a table were not measured, by these columns."""
    by = [*columns, "status", "reason"]
    others = table.loc[table.status != "ok", by].fillna("all").groupby(by, sort=False)
    return [": ".join(map(str, key)) + f" ({len(group)})" for key, group in others]


def check_triton(options: argparse.Namespace) -> None:
    """End the program where Triton's kernels cannot run, or interpreted times would be saved."""
    if reason := mode.missing():
        raise SystemExit(reason)
    if mode.interpreted() and options.save:
        raise SystemExit("the kernels are interpreted here: such times are not worth keeping")


def one_line(error: BaseException) -> str:
    """Return the message of an error, without line breaks."""
    return " ".join(str(error).split())


def names(text: str) -> list[str]:
    """Return 'a,b' as ['a', 'b'], for argparse."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text: str) -> list[int]:
    """Return '1,2' as [1, 2], for argparse."""
    return [int(part) for part in names(text)]


def lengths(text: str) -> list[int]:
    """Return '2K,512' as [2048, 512], for argparse."""
    return [parse_tokens(part) for part in names(text)]


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a type for argparse: some of the known names, separated by commas."""
    known = list(known)

    def chosen(text: str) -> list[str]:
        if unknown := set(names(text)) - set(known):
            said = f"there is no {', '.join(sorted(unknown))}, only {', '.join(known)}"
            raise argparse.ArgumentTypeError(said)
        return names(text)

    return chosen
