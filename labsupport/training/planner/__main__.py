"""Predicted memory of a training step, and which remedies fit a limit; nothing is measured.

python -m labsupport.training.planner --preset tiny --lengths 1024,4096 --checkpoint
python -m labsupport.training.planner --preset gpt2-small --autocast bfloat16 --ladder 16GiB
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from labsupport.profiling.units import format_bytes
from labsupport.training.config import PRESETS, DecoderConfig, MemoryOptions
from labsupport.training.planner.plan import plan_memory, what_fits
from labsupport.training.sizes import parse_tokens

DTYPES = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plan of the longest length, or the remedies of --ladder."""
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.training.planner", description=main.__doc__
    )
    add_options(parser)
    parser.add_argument("--device", help="cpu or cuda; by default the GPU if there is one")
    parser.add_argument("--ladder", metavar="LIMIT", help="which remedies fit, say, 16GiB")
    options = parser.parse_args(arguments)
    config, length = DecoderConfig.preset(options.preset), max(options.lengths)
    step = plan_options(options)
    if options.ladder is None:
        print(plan_memory(config, seqlen=length, **step))
        return
    shared = {name: step[name] for name in ("batch", "device")}
    table = what_fits(config, options.ladder, seqlen=length, **shared)
    shown = table.assign(peak_bytes=table.peak_bytes.map(format_bytes))
    print(shown.rename(columns={"peak_bytes": f"peak at {length}"}).to_string(index=False))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a step: for this program, and for the one that measures."""
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


def plan_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return those of `add_options` and --device as arguments of `plan_memory`."""
    return {
        "batch": options.batch,
        # A plan may be of a device that is not here.
        "device": options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        "savings": MemoryOptions(
            options.attention,
            options.checkpoint,
            options.mlp_chunk,
            options.loss_chunk,
            DTYPES[options.residual],
        ),
        "autocast": DTYPES[options.autocast],
        "optimizer": None if options.optimizer == "none" else options.optimizer,
        "accumulation": options.accumulation,
    }


def _lengths(text: str) -> list[int]:
    return [parse_tokens(length) for length in text.split(",")]


if __name__ == "__main__":
    main()
