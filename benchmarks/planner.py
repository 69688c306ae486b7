"""Predicted beside measured memory of a training step.

python -m benchmarks planner --preset gpt2-small --autocast bfloat16 --lengths 1K,4K --save NAME
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from labsupport.profiling.units import format_bytes
from labsupport.training import DecoderConfig
from labsupport.training.planner import compare
from labsupport.training.planner.__main__ import add_options as add_step_options
from labsupport.training.planner.__main__ import plan_options

if TYPE_CHECKING:
    import pandas as pd


def add_options(parser: ArgumentParser) -> None:
    add_step_options(parser)


def measure(options: Namespace) -> pd.DataFrame:
    step = plan_options(options)
    table = compare(DecoderConfig.preset(options.preset), options.lengths, **step)
    named = ("preset", "batch", "autocast", "optimizer", "accumulation")
    savings = {name: str(value) for name, value in asdict(step["savings"]).items()}
    table.attrs["provenance"] |= {name: getattr(options, name) for name in named}
    table.attrs["provenance"]["savings"] = savings
    return table


def show(table: pd.DataFrame, options: Namespace) -> str:
    shown = table[["seqlen"]].copy()
    for name in ("predicted", "measured"):
        sizes = table[f"{name}_bytes"]
        shown[name] = [format_bytes(size) if size == size else "" for size in sizes]
    shown["error"] = [f"{error:+.1%}" if error == error else "" for error in table["error"]]
    return shown.assign(peak=table["when"], status=table["status"]).to_string(index=False)
