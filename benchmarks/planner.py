"""Predicted and measured memory of a training step.

python -m benchmarks planner --preset gpt2-small --autocast bfloat16 --lengths 1K,4K --save NAME
"""

from argparse import ArgumentParser, Namespace

import pandas as pd
import torch

from benchmarks.runner import Row, Trial, lengths, run
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import format_bytes
from labsupport.training.config import PRESETS, DecoderConfig
from labsupport.training.planner import measure_step, plan_memory


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", default="tiny", choices=sorted(PRESETS), help="the decoder's shape")
    add("--lengths", type=lengths, default="1024", help="tokens, separated by commas")
    add("--autocast", choices=["bfloat16", "float16"], help="dtype of matrix products")


def measure(options: Namespace) -> pd.DataFrame:
    config, device = DecoderConfig.preset(options.preset), resolve_device(options.device)
    autocast = getattr(torch, options.autocast) if options.autocast else None
    cases = []
    for seqlen in options.lengths:
        step = {"seqlen": seqlen, "device": device, "autocast": autocast}
        plan = plan_memory(config, **step)

        def measured(step: Row = step, predicted: int = plan.peak_bytes) -> Row:
            peak = measure_step(config, **step).peak_bytes
            return {"measured_bytes": peak, "error": predicted / peak - 1}

        row = {"seqlen": seqlen, "predicted_bytes": plan.peak_bytes, "when": plan.when}
        cases.append(Trial(row, measured))
    return run(cases, device, preset=options.preset, autocast=options.autocast)


def show(table: pd.DataFrame, options: Namespace) -> str:
    shown = table.reindex(columns=["seqlen", "when", "status"])
    for name in ("predicted_bytes", "measured_bytes"):
        shown[name] = table[name].map(format_bytes, na_action="ignore") if name in table else ""
    return shown.assign(error=table.get("error")).to_string(index=False, na_rep="")
