"""A command's table for other programs: JSON and CSV."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def export(
    table: pd.DataFrame, *, to_json: str | None, to_csv: Path | None, **further: Any
) -> None:
    """Write the table where asked.

    Args:
        to_json: a file, or "-" for stdout. An object with "provenance", "results" (one object for
            each row; what has no value is null) and `further`.
        to_csv: a file: the rows alone.
    """
    if to_csv is not None:
        to_csv.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(to_csv, index=False)
    if to_json is None:
        return
    rows = json.loads(table.to_json(orient="records"))  # NaN, which JSON lacks, becomes null
    record = {"provenance": table.attrs.get("provenance", {}), **further, "results": rows}
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    if to_json == "-":
        sys.stdout.write(text)
    else:
        Path(to_json).parent.mkdir(parents=True, exist_ok=True)
        Path(to_json).write_text(text, encoding="utf-8")
