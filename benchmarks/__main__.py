"""The maintainers' program: `python -m benchmarks NAME [options]`.

Every program is a file of this folder with three functions:

    add_options(parser)          its own options
    measure(options) -> table    measures; provenance in `.attrs["provenance"]`
    show(table, options) -> text what the terminal shows

Here are the options of all: --device, --save NAME (keep the table under data/runs/NAME),
--overwrite. A table with a column `ok` that is not all true ends with exit status 1. Weights, and
not a table, come from `python -m benchmarks.recall`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from labsupport.profiling.runs import check_run_name, runs_dir, save_run

# Each with the first line of its file, which says what it measures.
PROGRAMS = {
    path.stem: path.read_text(encoding="utf-8").split("\n")[0].strip('"')
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))
    if path.stem not in ("runner", "recall")
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
    parser.add_argument(
        "--save", metavar="NAME", type=check_run_name, help="keep the table under data/runs/NAME"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a saved run of that name")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one program, show its table, and save it if asked to; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    outer = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure what data/runs holds, tune the kernels, compare with other libraries.",
        epilog="\n".join(f"{name:18} {text}" for name, text in PROGRAMS.items()),
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
    if options.save:
        # What took minutes to measure is not lost to a name that is taken: NAME-2, NAME-3, ...
        free, number = options.save, 1
        while not options.overwrite and (runs_dir() / free / "results.csv").exists():
            number += 1
            free = f"{options.save}-{number}"
        print(f"saved: {save_run(table, free, overwrite=options.overwrite)}")
        if number > 1:
            print(f"{options.save} exists already; --overwrite would have replaced it")
    return int("ok" in table and not table["ok"].eq(True).all())


if __name__ == "__main__":
    sys.exit(main())
