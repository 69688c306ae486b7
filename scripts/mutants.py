"""The tests' protection as one number: the share of small faults in the code that they notice.

    python scripts/mutants.py cover   run the tests once, and note which test runs which line
    python scripts/mutants.py run --save data/upkeep/NAME.csv

A mutant is the code with one change: an operator, a constant, a condition, a result or a statement.
`cover` runs the fast tests under coverage.py (`pip install coverage`) with a context for each test,
child processes included. `run` samples mutants with a fixed seed over the rooms below and runs each
against the tests that run its line, the quickest first, in a copy of the checkout. A mutant that no
test runs has survived; one whose tests do not end has not.
"""

import argparse
import ast
import copy
import csv
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "build" / "mutants"
ROOMS = (
    *(f"labsupport/{room}" for room in ("attention", "precision", "training", "analysis")),
    *("labsupport/distributed/ring", "labsupport/checks", "grader"),
)
SECONDS = 60  # for one mutant
ENOUGH = 30  # CPU seconds of tests, as `cover` measured them; the slowest may stay out
PAIRS = "Add Sub, Mult Div, Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn, And Or"
SWAPS = {"FloorDiv": "Mult", "Mod": "FloorDiv", "Pow": "Mult", "MatMult": "Mult"}
for _one, _other in (pair.split() for pair in PAIRS.split(",")):
    SWAPS |= {_one: _other, _other: _one}


# --- mutants -------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """A file with the text of one node replaced.

    path: the file, relative to the checkout. start, end: the text, as offsets in the file's bytes.
    new: what stands there instead. first, last: lines of the statement, without the body of a
    compound one.
    """

    path: str
    start: int
    end: int
    new: str
    first: int
    last: int


def replacement(node: Any) -> tuple[Any, str] | None:
    """Return the node whose text changes and its new text, or None where nothing can change."""

    def swapped(operator: ast.AST) -> ast.AST:
        name = type(operator).__name__
        return getattr(ast, SWAPS.get(name, name))()

    new: Any = copy.copy(node)
    match node:
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp():
            new.op = swapped(node.op)
        case ast.Compare():
            new.ops = [swapped(node.ops[0]), *node.ops[1:]]
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            new = node.operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value) | float(value)):
            new.value = value + 1
        case ast.If() | ast.While() | ast.IfExp():
            return node.test, f"(not ({ast.unparse(node.test)}))"
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            return value, "None"
        case ast.Raise() | ast.Expr(value=ast.Call()):
            return node, "pass"
    text = ast.unparse(new)
    if text == ast.unparse(node):
        return None
    return node, text if isinstance(node, ast.stmt) else f"({text})"


def mutants_of(root: Path) -> Iterator[Mutant]:
    """All mutants of the functions in the rooms' files."""
    for path in sorted(file for room in ROOMS for file in (root / room).rglob("*.py")):
        source, name = path.read_bytes(), path.relative_to(root).as_posix()
        starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
        for node, statement in inside_functions(ast.parse(source)):
            if (place := replacement(node)) is not None:
                at, new = place
                body = getattr(statement, "body", None)
                last = body[0].lineno - 1 if body else statement.end_lineno
                start = starts[at.lineno - 1] + at.col_offset
                end = starts[at.end_lineno - 1] + at.end_col_offset
                first = statement.lineno
                yield Mutant(name, start, end, new, first, max(first, last))


def inside_functions(node: Any, statement: Any = None) -> Iterator[tuple[Any, Any]]:
    """Each node inside of a function, with the innermost statement that it belongs to."""
    if isinstance(node, ast.JoinedStr | ast.arguments):
        return  # positions inside of f-strings are wrong before Python 3.12
    if isinstance(node, ast.stmt) and statement is not None:
        statement = node
    if statement is not None:
        yield node, statement
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    inner = child if isinstance(node, ast.FunctionDef) else statement
                    yield from inside_functions(child, inner)


# --- which tests run which line ------------------------------------------------------------------


def cover(tests: list[str], workers: int) -> None:
    """Run the tests under coverage.py; contexts and durations end in `STORE`."""
    STORE.mkdir(parents=True, exist_ok=True)
    config = STORE / "coveragerc"
    include = "".join(f"\n    {ROOT}/{room}/*" for room in ROOMS)
    config.write_text(
        f"[run]\nparallel = true\ndata_file = {STORE}/data\npatch = subprocess, _exit\n"
        # A child process belongs to the test that started it.
        f"context = ${{PYTEST_CURRENT_TEST-}}\nsigterm = true\ninclude = {include}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "COVERED": "1"}
    command = ["coverage", "run", f"--rcfile={config}", "-m", "pytest", "-p", "mutants", "-q"]
    options = ["-n", str(workers), "--dist", "loadfile", "-m", "not slow and not browser", *tests]
    subprocess.run([sys.executable, "-m", *command, *options], cwd=ROOT, env=environment)
    combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={config}", "-q"]
    subprocess.run(combine, cwd=ROOT, check=True)


class Covered:
    """A function that measures itself for a test, on a rank: those serve many tests."""

    def __init__(self, function: Callable[..., Any], test: str) -> None:
        self.function, self.test = function, test

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call it, and save which lines ran."""
        import coverage

        measured = coverage.Coverage(config_file=str(STORE / "coveragerc"), context=self.test)
        with measured.collect():
            answer = self.function(*args, **options)
        measured.save()
        return answer


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    """Have the tests' pools of ranks measure their tasks, too."""
    yield
    if fixturedef.argname == "pool":
        from tests.distributed.workers import Workers

        plain = Workers.run

        def run(pool: Workers, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            test = os.environ["PYTEST_CURRENT_TEST"]
            return plain(pool, Covered(function, test), *args, **options)

        Workers.run = run


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count lines and CPU seconds for this test (this file is a plugin of `cover`)."""
    import coverage

    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(item.nodeid)
    before, failed = sum(os.times()[:4]), item.session.testsfailed
    yield
    if "COVERED" in os.environ and item.session.testsfailed == failed:  # else it can judge nothing
        with (STORE / f"seconds-{os.getpid()}.jsonl").open("a") as out:
            out.write(json.dumps([item.nodeid, sum(os.times()[:4]) - before]) + "\n")


def tests_of_lines() -> tuple[dict[str, dict[int, set[str]]], Counter[str]]:
    """Return file -> line -> tests that run it, and the CPU seconds of each test."""
    import coverage

    seconds: Counter[str] = Counter()
    for file in STORE.glob("seconds-*.jsonl"):
        seconds.update(dict(map(json.loads, file.read_text().splitlines())))
    data = coverage.CoverageData(str(STORE / "data"))
    data.read()
    lines: dict[str, dict[int, set[str]]] = {}
    for path in data.measured_files():
        found = lines[Path(path).relative_to(ROOT).as_posix()] = defaultdict(set)
        for line, contexts in data.contexts_by_lineno(path).items():
            # "test", or "|test", or in a child process "test (call)".
            tests = {context.strip("|").rsplit(" (", 1)[0] for context in contexts}
            found[line] |= tests & seconds.keys()
    return lines, seconds


# --- one mutant against its tests -----------------------------------------------------------------


def judge(mutant: Mutant, tests: list[str], place: Path) -> dict[str, Any]:
    """Run tests on the mutant, in a copy of the checkout; return a row."""
    path = place / mutant.path
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["timeout", "-k", "5", str(SECONDS), sys.executable, "-m", "pytest", "-x", "-q"]
    (chosen := place / "chosen-tests").write_text("\n".join(tests))  # too many for a command line
    command += ["-p", "no:cacheprovider", f"@{chosen}"]
    result = "not run"
    if tests:
        done = subprocess.run(command, cwd=place, env=os.environ | own, capture_output=True)
        result = {0: "survived", 124: "timeout"}.get(done.returncode, "killed")
    path.write_bytes(source)
    what = f"{' '.join(source[mutant.start : mutant.end].decode().split())} -> {mutant.new}"
    print(f"{result:9} {mutant.path}:{mutant.first}  {what}", flush=True)
    row = {"file": mutant.path, "line": mutant.first, "change": what}
    return row | {"tests": len(tests), "result": result}


def run(count: int, seed: int, workers: int) -> list[dict[str, Any]]:
    """Sample mutants and judge them; one row each."""
    chosen = random.Random(seed).sample(list(mutants_of(ROOT)), count)
    lines, seconds = tests_of_lines()
    copies: SimpleQueue[Path] = SimpleQueue()

    def one(mutant: Mutant) -> dict[str, Any]:
        found = lines.get(mutant.path, {})
        runs_it = [found.get(n, set()) for n in range(mutant.first, mutant.last + 1)]
        tests = sorted(set().union(*runs_it), key=seconds.__getitem__)
        spent = accumulate(seconds[test] for test in tests)
        quick = [test for test, sum_ in zip(tests, spent, strict=True) if sum_ < ENOUGH]
        place = copies.get()
        row = judge(mutant, quick or tests[:1], place)
        copies.put(place)
        return row

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(workers):
            copies.put(Path(folder, str(number)))
            subprocess.run(["git", "clone", "-q", ROOT, Path(folder, str(number))], check=True)
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, chosen))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["cover", "run"])
    parser.add_argument("--tests", nargs="+", default=["tests"], help="for `cover`")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", type=Path, help="a CSV file for the rows")
    options = parser.parse_args()
    if options.what == "cover":
        cover(options.tests, options.workers)
        return
    rows = run(options.count, options.seed, options.workers)
    results = Counter(row["result"] for row in rows)
    killed = results["killed"] + results["timeout"]
    print(f"{dict(results)}: {killed} of {len(rows)} noticed, {killed / len(rows):.0%}")
    if options.save:
        with options.save.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
