"""Predicted beside measured memory of a training step, on this device.

python -m labsupport.training.planner --preset tiny --lengths 1024,4096 --checkpoint
python -m labsupport.training.planner --preset gpt2-small --autocast bfloat16 --save NAME
python -m labsupport.training.planner --preset gpt2-small --autocast bfloat16 --ladder 16GiB
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.profiling.units import format_bytes
from labsupport.training.lengths import parse_tokens
from labsupport.training.model import PRESETS, DecoderConfig, Savings
from labsupport.training.planner.fits import what_fits
from labsupport.training.planner.measure import compare
from labsupport.training.planner.plan import plan_memory

DTYPES = {
    "none": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plan of the longest length, and the table for all of them."""
    options = _parser().parse_args(arguments)
    config = DecoderConfig.preset(options.preset)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shared: dict[str, Any] = {"batch": options.batch, "device": device}
    if options.ladder:
        length = max(options.lengths)
        table = what_fits(config, options.ladder, seqlen=length, **shared)
        shown = table.assign(peak_bytes=table.peak_bytes.map(format_bytes))
        print(shown.rename(columns={"peak_bytes": f"peak at {length}"}).to_string(index=False))
        return
    savings = Savings(
        attention=options.attention,
        checkpoint=options.checkpoint,
        mlp_chunk=options.mlp_chunk,
        loss_chunk=options.loss_chunk,
        residual=DTYPES[options.residual],
    )
    shared |= {
        "savings": savings,
        "autocast": DTYPES[options.autocast],
        "optimizer": None if options.optimizer == "none" else options.optimizer,
        "accumulation": options.accumulation,
    }
    print(plan_memory(config, seqlen=max(options.lengths), **shared), end="\n\n")
    table = compare(config, options.lengths, **shared)
    table.attrs["provenance"] |= {
        "preset": options.preset,
        "batch": options.batch,
        "autocast": options.autocast,
        "optimizer": options.optimizer,
        "accumulation": options.accumulation,
        "savings": {name: str(value) for name, value in asdict(savings).items()},
    }
    print(_shown(table))
    save_if_asked(table, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.training.planner", description=main.__doc__
    )
    add = parser.add_argument
    add("--preset", default="tiny", choices=sorted(PRESETS), help="the decoder's shape")
    add("--lengths", type=_lengths, default=[1024], help="tokens, separated by commas")
    add("--batch", type=int, default=1, help="sequences at a time")
    add("--attention", default="auto", help="a backend's name")
    add("--checkpoint", action="store_true", help="keep only each block's input")
    add("--mlp-chunk", type=int, help="tokens at a time through the MLP")
    add("--loss-chunk", type=int, help="tokens at a time through the classifier")
    add("--residual", default="none", choices=DTYPES, help="dtype of the residual stream")
    add("--autocast", default="none", choices=DTYPES, help="dtype of matrix products")
    add("--optimizer", default="auto", choices=["auto", "loop", "foreach", "fused", "none"])
    add("--accumulation", type=int, default=1, help="micro-batches of a step")
    add("--device", help="cpu or cuda; by default the GPU if there is one")
    add("--ladder", metavar="LIMIT", help="measure nothing: which remedies fit, say, 16GiB")
    add_save_options(parser)
    return parser


def _lengths(text: str) -> list[int]:
    return [parse_tokens(length) for length in text.split(",")]


def _shown(table: Any) -> str:
    shown = table[["seqlen"]].copy()
    for name in ("predicted", "measured"):
        sizes = table[f"{name}_bytes"]
        shown[name] = [format_bytes(size) if size == size else "" for size in sizes]
    shown["error"] = [f"{error:+.1%}" if error == error else "" for error in table["error"]]
    return shown.assign(peak=table["when"], status=table["status"]).to_string(index=False)


if __name__ == "__main__":
    main()
