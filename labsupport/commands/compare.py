"""The command `labsupport compare`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from labsupport.commands.grid_options import (
    CSV,
    DEVICE,
    DTYPE,
    JSON,
    NO_GRAD,
    OVERWRITE,
    PRESET,
    SAVE,
    keep_table,
)

Option = typer.Option


def compare_command(
    batch: Annotated[int | None, Option(help="Sequences. Default: 2.")] = None,
    seqlen: Annotated[int | None, Option(help="Tokens in each. Default: 1024.")] = None,
    nheads: Annotated[int | None, Option(help="Query heads. Default: 8.")] = None,
    headdim: Annotated[int | None, Option(help="Default: 64.")] = None,
    causal: Annotated[
        bool | None, Option("--causal/--no-causal", help="Hide the future. Default: no.")
    ] = None,
    dtype: Annotated[str | None, DTYPE] = None,
    no_grad: Annotated[bool, NO_GRAD] = False,
    kv_heads: Annotated[int | None, Option(help="Key/value heads. Default: as --nheads.")] = None,
    preset: Annotated[str | None, PRESET] = None,
    max_seconds: Annotated[float, Option(help="For the repeats of each.")] = 1.0,
    device: Annotated[str | None, DEVICE] = None,
    to_json: Annotated[str | None, JSON] = None,
    to_csv: Annotated[Path | None, CSV] = None,
    save: Annotated[str | None, SAVE] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> None:
    """Compare all implementations that run here: the fastest, the leanest, and what to do next.

    of ceiling: of what this device's own matrix products and copies reach, measured just now.
    good: half of it or more; fair: a quarter.

    \b
    labsupport compare --seqlen 2048 --causal --no-grad
    labsupport compare --preset long-8k --no-grad --csv table.csv
    """
    from dataclasses import asdict

    from labsupport.profiling.bench.compare import report, run_compare
    from labsupport.profiling.bench.request import one_case
    from labsupport.profiling.hardware import measured_ceilings
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    case = one_case(
        where,
        backend="standard",
        preset=preset,
        dtype=dtype,
        grad=not no_grad,
        batch=batch,
        seqlen=seqlen,
        heads=nheads,
        head_dim=headdim,
        causal=causal,
        kv_heads=kv_heads,
    )
    ceilings = measured_ceilings(str(where))
    table = run_compare(case, where, ceilings, max_seconds=max_seconds)
    typer.echo("\n".join(report(table, case, ceilings)), err=to_json == "-")
    keep_table(table, to_json, to_csv, save, overwrite, ceilings=asdict(ceilings))
