"""The commands of the `labsupport` program, one file each; imports stay light until one runs.

Here are the options that `bench`, `compare`, `sweep` and `profile` share, and what writes a table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pandas as pd

Option = typer.Option

# One shape.
Batch = Annotated[
    int | None, Option(min=1, envvar="LABSUPPORT_BATCH", help="Sequences. Default: 2.")
]
Seqlen = Annotated[
    int | None, Option(min=1, envvar="LABSUPPORT_SEQLEN", help="Tokens in each. Default: 1024.")
]
Nheads = Annotated[
    int | None, Option(min=1, envvar="LABSUPPORT_NHEADS", help="Query heads. Default: 8.")
]
Headdim = Annotated[int | None, Option(min=1, help="Size of a head's vectors. Default: 64.")]
KvHeads = Annotated[int | None, Option(min=1, help="Key/value heads. Default: as --nheads.")]
Causal = Annotated[bool | None, Option("--causal/--no-causal", help="Hide the future.")]
Preset = Annotated[
    str | None, Option(help="A model's shape (bench --list-presets). Other options override it.")
]
# All.
Dtype = Annotated[
    str | None, Option(help="fp16, bf16, fp32 or PyTorch's names. Default: bf16 on GPUs, or fp32.")
]
NoGrad = Annotated[bool, Option("--no-grad", help="Forward pass only.")]
Repeats = Annotated[
    int | None, Option(min=1, help="Number of repeats. Default: until the median is known to 2%.")
]
MaxSeconds = Annotated[float, Option(min=0.001, help="Seconds for the repeats of each case.")]
Device = Annotated[str | None, Option(help="cpu or cuda. Default: the GPU, if any.")]
Json = Annotated[
    str | None, Option("--json", help="Write everything as JSON to this file; - is stdout.")
]
Csv = Annotated[Path | None, Option("--csv", help="Write the rows as CSV to this file.")]


def show_table(
    text: str,
    table: pd.DataFrame,
    to_json: str | None,
    to_csv: Path | None,
    **further: object,
) -> None:
    """Print a table's report, and export the rows.

    The JSON object has "provenance", `further`, and "results": an object for each row.
    """
    typer.echo(text, err=to_json == "-")
    if to_csv is not None:
        to_csv.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(to_csv, index=False)
    if to_json is not None:
        rows = json.loads(table.to_json(orient="records"))  # NaN, which JSON lacks, becomes null
        record = {"provenance": table.attrs.get("provenance", {}), **further, "results": rows}
        written = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        if to_json == "-":
            sys.stdout.write(written)
        else:
            Path(to_json).parent.mkdir(parents=True, exist_ok=True)
            Path(to_json).write_text(written, encoding="utf-8")
