"""The maintainers' program: `python -m benchmarks NAME [options]`.

Every program is a file of this folder with three functions:

    add_options(parser)          its own options
    measure(options) -> table    measures; provenance in `.attrs["provenance"]`
    show(table, options) -> text what the terminal shows

Here are the options of all: --device, --save NAME (keep the table under data/runs/NAME),
--overwrite. A table with a column `ok` that is not all true ends with exit status 1.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from labsupport.profiling.runs import add_save_options, save_if_asked

PROGRAMS = {
    "agreement": "losses and gradients under two attentions",
    "attention": "time, memory and error of attention over a grid",
    "data_parallel": "training steps under DDP and FSDP by number of ranks",
    "generation": "decode, prefill and training steps of models with random weights",
    "models": "a whole model reading a file",
    "planner": "predicted and measured memory of a training step",
    "predictor": "what a predictor is calibrated on",
    "sequence_parallel": "training steps with a sharded sequence",
    "tasks": "a model's scores by its window",
    "traffic": "bytes that a GPU moves, counted by ncu",
    "training": "training steps by length, remedy after remedy",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program, show its table, and save it if asked to; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    outer = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what data/runs holds, tune the kernels, compare with other libraries.",
        epilog="\n".join(f"{name:20} {text}" for name, text in PROGRAMS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    outer.add_argument("program", choices=list(PROGRAMS), metavar="NAME")
    name = outer.parse_args(arguments[:1]).program
    program = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=program.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program.add_options(parser)
    parser.add_argument("--device", help="cpu or cuda; default: the GPU if there is one")
    add_save_options(parser)
    options = parser.parse_args(arguments[1:])
    table = program.measure(options)
    if table is None:  # under torchrun, rank 0 shows and saves
        return 0
    print(program.show(table, options))
    save_if_asked(table, options)
    return int("ok" in table and not table["ok"].all())


if __name__ == "__main__":
    sys.exit(main())
