"""The maintainers' program: `python -m benchmarks NAME [options]`.

Every program is a file of this folder with three functions:

    add_options(parser)          its own options
    measure(options) -> table    measures; provenance in `.attrs["provenance"]`
    show(table, options) -> text what the terminal shows

Here are the options of all: --device, --save NAME (keep the table under data/runs/NAME),
--overwrite. A table with a column `ok` that is not all true ends with exit status 1. Weights, and
not a table, come from `python -m benchmarks.recall`.
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
    "baseline_noise": "how the time of an unchanged program varies",
    "claims": "the lab's own claims, with targets",
    "clocks": "this lab's clock beside others",
    "data_parallel": "training steps under DDP and FSDP by number of ranks",
    "decode": "decoding from a long cache beside other libraries",
    "dtypes": "what each backend does with each combination of dtypes",
    "generation": "decode, prefill and training steps of models with random weights",
    "grading": "seconds per submission, beside nbgrader",
    "loop_orders": "version 1's loop order beside version 2's",
    "models": "a whole model reading a file",
    "overhead": "Python's share of a call, backend by backend",
    "peers": "forward and backward beside other libraries, shape by shape",
    "planner": "predicted and measured memory of a training step",
    "predictor": "what a predictor is calibrated on",
    "resources": "what the compiler makes of the Triton kernels; needs no GPU",
    "sequence_parallel": "training steps with a sharded sequence",
    "tasks": "a model's scores by its window",
    "traffic": "bytes that a GPU moves, counted by ncu",
    "training": "training steps by length, remedy after remedy",
    "tune": "the fastest tilings on this GPU",
}


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of one program's options."""
    program = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=program.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    program.add_options(parser)
    parser.add_argument("--device", help="cpu or cuda; default: the GPU if there is one")
    add_save_options(parser)
    return parser


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
    options = parser_of(name).parse_args(arguments[1:])
    program = importlib.import_module(f"benchmarks.{name}")
    table = program.measure(options)
    if table is None:  # under torchrun, rank 0 shows and saves
        return 0
    print(program.show(table, options))
    save_if_asked(table, options)
    return int("ok" in table and not table["ok"].eq(True).all())


if __name__ == "__main__":
    sys.exit(main())
