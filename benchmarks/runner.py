"""One runner: how every program here turns trials into a table.

A program lists its trials; the runner measures them one after the other, frees memory in between,
and turns a case that does not run into a row with a status and a reason, as `run_grid` does:

    ok, unsupported, out of memory, failed
"""

import argparse
import gc
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from labsupport.attention.kernels import mode
from labsupport.profiling.grids import refusal
from labsupport.profiling.provenance import command_line, provenance
from labsupport.profiling.runs import runs_dir, save_run
from labsupport.profiling.timing import Timing, captured, measure_interleaved
from labsupport.profiling.units import parse_tokens

Row = Mapping[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Trial:
    """One thing to measure.

    Attributes:
        row: the columns that identify it; they stand in every row of it.
        measure: returns the measured columns, or a list of them for several rows (of calls that
            are timed in turns, say).
    """

    row: Row
    measure: Callable[[], Row | Sequence[Row]]


def run(
    cases: Iterable[Trial],
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
    world = os.environ.get("LOCAL_WORLD_SIZE")
    starter = f"torchrun --nproc-per-node {world}" if world else "python"
    record = provenance(device, command=command_line().replace("python", starter, 1), **about)
    rows: list[dict[str, Any]] = []

    def so_far() -> pd.DataFrame:
        table = pd.DataFrame(rows)
        table.attrs["provenance"] = record
        return table

    try:
        for case in tqdm(cases, disable=not progress, unit="case", leave=False):
            try:
                found = case.measure()
            except Exception as error:
                found = refusal(error)
            several = [found] if isinstance(found, Mapping) else found
            rows += [{**case.row, "status": "ok", "reason": "", **row} for row in several]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if on_rows is not None:
                on_rows(so_far())
    except KeyboardInterrupt:
        record["interrupted"] = True
    return so_far()


def in_turns(
    calls: Mapping[Any, Call],
    device: torch.device,
    max_seconds: float,
    *,
    min_seconds: float = 0.0,
    graphs: bool = True,
) -> dict[Any, dict[str, Any]]:
    """Time calls in turns, each recorded as a CUDA graph where it can be.

    There are at least three repeats, and `min_seconds` to `max_seconds` for each call on average.

    Returns:
        by key: in_graph and the columns of `spread`; or status and reason of a call that does not
        run.
    """
    rows: dict[Any, dict[str, Any]] = {}
    ready: dict[Any, Call] = {}
    for key, call in calls.items():
        try:
            ready[key], in_graph = captured(call, device) if graphs else (call, False)
            rows[key] = {"in_graph": in_graph}
        except Exception as problem:
            rows[key] = {"in_graph": False, **refusal(problem)}
    if ready:
        timings = measure_interleaved(
            ready, device=device, warmup=1, min_repeats=3, max_repeats=10_000,
            min_seconds=min_seconds * len(ready), max_seconds=max_seconds * len(ready),
        )  # fmt: skip
        for key, timing in timings.items():
            rows[key] |= spread(timing)
    return rows


def spread(timing: Timing) -> dict[str, Any]:
    """Return the columns median_ms, q1_ms, q3_ms and repeats."""
    columns = {f"{part}_ms": getattr(timing, part) for part in ("median", "q1", "q3")}
    return columns | {"repeats": timing.repeats}


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


def some_of(
    known: Iterable[str] | None = None, kind: Callable[[str], Any] = str
) -> Callable[[str], list[Any]]:
    """Return a type for argparse: values separated by commas, only known ones if those are given.

    >>> some_of(kind=int)("1,2")
    [1, 2]
    """
    known = None if known is None else list(known)

    def chosen(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        unknown = [part for part in parts if known is not None and part not in known]
        if known is not None and unknown:
            said = f"there is no {', '.join(unknown)}, only {', '.join(known)}"
            raise argparse.ArgumentTypeError(said)
        return [kind(part) for part in parts]

    return chosen


names, numbers, lengths = some_of(), some_of(kind=int), some_of(kind=parse_tokens)
