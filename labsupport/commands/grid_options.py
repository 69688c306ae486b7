"""Options that `labsupport bench`, `sweep` and `compare` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import pandas as pd

Option = typer.Option

DEVICE = Option(help="cpu or cuda. Default: the GPU, if any.")
DTYPE = Option(help="fp16, bf16, fp32 or PyTorch's names. Default: bf16 on GPUs, fp32 on CPUs.")
PRESET = Option(help="A model's shape: --list-presets says which. Options beside it win.")
JSON = Option("--json", help="Write all as JSON to this file; - is the terminal.")
CSV = Option("--csv", help="Write the rows as CSV to this file.")


def _run_name(name: str | None) -> str | None:
    """Refuse a bad name before anything is measured."""
    from labsupport.profiling.runs import check_run_name

    if name is not None:
        check_run_name(name)
    return name


SAVE = Option(callback=_run_name, help="Keep the table under data/runs/SAVE, with its provenance.")
OVERWRITE = Option("--overwrite", help="Replace a run of that name.")
NO_GRAD = Option("--no-grad", help="The forward pass alone. Default: with the backward pass.")


def keep_table(
    table: pd.DataFrame,
    to_json: str | None,
    to_csv: Path | None,
    save: str | None,
    overwrite: bool,
    **further: object,
) -> None:
    """Export a table, and save it as a recorded run if `save` names one."""
    from labsupport.profiling.bench.export import export
    from labsupport.profiling.runs import keep_run

    export(table, to_json=to_json, to_csv=to_csv, **further)
    if save is not None:
        typer.echo(keep_run(table, save, overwrite=overwrite), err=True)
