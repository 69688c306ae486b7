"""Predicted beside measured memory of a training step.

python -m benchmarks planner --preset gpt2-small --autocast bfloat16 --lengths 1K,4K --save NAME
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.runner import Case, Row, run
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import format_bytes
from labsupport.training.config import DecoderConfig
from labsupport.training.planner import measure_step, plan_memory
from labsupport.training.planner.__main__ import add_options as add_step_options
from labsupport.training.planner.__main__ import plan_options

if TYPE_CHECKING:
    import pandas as pd


def add_options(parser: ArgumentParser) -> None:
    add_step_options(parser)


def measure(options: Namespace) -> pd.DataFrame:
    config, step = DecoderConfig.preset(options.preset), plan_options(options)

    def measured(seqlen: int, predicted: int) -> Row:
        peak = measure_step(config, seqlen=seqlen, **step).peak_bytes
        return {"measured_bytes": peak, "error": predicted / peak - 1}

    cases = []
    for seqlen in options.lengths:
        plan = plan_memory(config, seqlen=seqlen, **step)
        row = {"seqlen": seqlen, "predicted_bytes": plan.peak_bytes, "when": plan.when}
        cases.append(Case(row, partial(measured, seqlen, plan.peak_bytes)))
    named = ("preset", "batch", "autocast", "optimizer", "accumulation")
    about: dict[str, Any] = {name: getattr(options, name) for name in named}
    about["savings"] = {name: str(value) for name, value in asdict(step["savings"]).items()}
    return run(cases, resolve_device(step["device"]), **about)


def show(table: pd.DataFrame, options: Namespace) -> str:
    shown = table[["seqlen"]].copy()
    for name in ("predicted", "measured"):
        sizes = table.get(f"{name}_bytes", [float("nan")] * len(table))
        shown[name] = [format_bytes(size) if size == size else "" for size in sizes]
    errors = table.get("error", [float("nan")] * len(table))
    shown["error"] = [f"{error:+.1%}" if error == error else "" for error in errors]
    return shown.assign(peak=table["when"], status=table["status"]).to_string(index=False)
