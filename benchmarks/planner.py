"""Predicted beside measured memory of a training step.

python -m benchmarks planner --preset gpt2-small --autocast bfloat16 --lengths 1K,4K --save NAME
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.runner import Case, Row, lengths, run
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import format_bytes
from labsupport.training.config import PRESETS, DecoderConfig, MemoryOptions
from labsupport.training.planner import measure_step, plan_memory

if TYPE_CHECKING:
    import pandas as pd


DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", default="tiny", choices=sorted(PRESETS), help="the decoder's shape")
    add("--lengths", type=lengths, default="1024", help="tokens, separated by commas")
    add("--batch", type=int, default=1, help="sequences at a time")
    add("--attention", default="auto", help="a backend's name")
    add("--checkpoint", action="store_true", help="keep only each block's input")
    add("--mlp-chunk", type=int, help="tokens at a time through the MLP")
    add("--loss-chunk", type=int, help="tokens at a time through the classifier")
    add("--residual", default="none", choices=DTYPES, help="dtype of the residual stream")
    add("--autocast", default="none", choices=DTYPES, help="dtype of matrix products")
    add("--accumulation", type=int, default=1, help="micro-batches of a step")


def measure(options: Namespace) -> pd.DataFrame:
    config, device = DecoderConfig.preset(options.preset), resolve_device(options.device)
    savings = MemoryOptions(
        options.attention,
        options.checkpoint,
        options.mlp_chunk,
        options.loss_chunk,
        DTYPES[options.residual],
    )
    step: dict[str, Any] = {"batch": options.batch, "device": device, "savings": savings}
    step |= {"autocast": DTYPES[options.autocast], "accumulation": options.accumulation}

    def measured(seqlen: int, predicted: int) -> Row:
        peak = measure_step(config, seqlen=seqlen, **step).peak_bytes
        return {"measured_bytes": peak, "error": predicted / peak - 1}

    cases = []
    for seqlen in options.lengths:
        plan = plan_memory(config, seqlen=seqlen, **step)
        row = {"seqlen": seqlen, "predicted_bytes": plan.peak_bytes, "when": plan.when}
        cases.append(Case(row, partial(measured, seqlen, plan.peak_bytes)))
    named = ("preset", "batch", "autocast", "accumulation")
    about: dict[str, Any] = {name: getattr(options, name) for name in named}
    about["savings"] = {name: str(value) for name, value in asdict(savings).items()}
    return run(cases, device, **about)


def show(table: pd.DataFrame, options: Namespace) -> str:
    shown = table[["seqlen"]].copy()
    for name in ("predicted", "measured"):
        sizes = table.get(f"{name}_bytes", [float("nan")] * len(table))
        shown[name] = [format_bytes(size) if size == size else "" for size in sizes]
    errors = table.get("error", [float("nan")] * len(table))
    shown["error"] = [f"{error:+.1%}" if error == error else "" for error in errors]
    return shown.assign(peak=table["when"], status=table["status"]).to_string(index=False)
