"""The command `python -m labsupport.training.measure`: see there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from labsupport.profiling.runs import add_save_options, save_if_asked
from labsupport.training.lengths import parse_tokens
from labsupport.training.measure import longest_that_trains, measure_training, readable
from labsupport.training.model import PRESETS, DecoderConfig
from labsupport.training.planner.fits import LADDER, Rung
from labsupport.training.steps import PLAIN

LAST = len(LADDER) - 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure training steps of a decoder, print the table, and keep it if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.training.measure", description=main.__doc__
    )
    add = parser.add_argument
    add("--preset", default="tiny", choices=sorted(PRESETS), help="the decoder's shape")
    add("--lengths", default="1K,2K,4K", help="tokens, separated by commas; 8K is 8,192")
    add("--rungs", type=_rungs, help=f"which remedies, such as 2,4; default: all, 0 to {LAST}")
    add(
        "--plain",
        action="store_true",
        help="Transformers' own GPT-2 in place of the lab's remedies",
    )
    add("--attention", help="the backend in place of 'auto'")
    add("--limit", help="such as 16GiB")
    add("--longest", action="store_true", help="search the longest sequence under the limit (GPU)")
    add("--multiple", default="1K", help="of which --longest finds a multiple")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    config = DecoderConfig.preset(options.preset)
    rungs = PLAIN if options.plain else _chosen(options.rungs, options.attention)
    if options.longest:
        if options.limit is None:
            parser.error("--longest needs a --limit")
        table = longest_that_trains(
            config, options.limit, rungs=rungs, multiple=parse_tokens(options.multiple)
        )
    else:
        lengths = [parse_tokens(text) for text in options.lengths.split(",")]
        table = measure_training(config, lengths, rungs=rungs, limit=options.limit)
    print(readable(table).to_string(index=False))
    save_if_asked(table, options)


def _chosen(numbers: list[int] | None, attention: str | None) -> list[Rung]:
    rungs = [LADDER[n] for n in numbers or range(len(LADDER))]
    if attention is None:
        return rungs
    return [
        rung
        if rung.savings.attention == "standard"
        else replace(rung, savings=replace(rung.savings, attention=attention))
        for rung in rungs
    ]


def _rungs(text: str) -> list[int]:
    """For argparse: numbers of remedies."""
    numbers = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(numbers) != text.count(",") + 1 or not all(n <= LAST for n in numbers):
        listing = ", ".join(f"{n}: {rung.name}" for n, rung in enumerate(LADDER))
        raise argparse.ArgumentTypeError(f"{text!r} names no remedies. There are {listing}")
    return numbers
