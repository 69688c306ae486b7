"""The tests' protection as one number: of so many small faults in the code, how many are noticed?

    python scripts/mutants.py cover   run the tests once, and note which test runs which line
    python scripts/mutants.py run --save data/upkeep/NAME.csv

A mutant is the code with one change: an operator, a constant, a condition, a result or a statement.
`cover` runs the fast tests under coverage.py (`pip install coverage`) with a context for each test,
child processes included. `run` samples mutants with a fixed seed over the rooms below and runs each
against the tests that run its line, the quickest first, in a process forked with PyTorch loaded, in
a copy of the checkout. A mutant that no test runs has survived; one whose tests do not end has not.

With --checkout DIR both look at another checkout, an older one for example; its environment has to
be the one that runs this file.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

ROOMS = (
    *(f"labsupport/{room}" for room in ("attention", "precision", "training", "analysis")),
    *("labsupport/distributed/ring", "labsupport/checks", "grader", "labsupport/grading"),
)
SECONDS = 60  # for one mutant
ENOUGH = 30  # CPU seconds of tests, as `cover` measured them; the slowest may stay out
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


# --- mutants -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A file with the text of one node replaced.

    Attributes:
        path: the file, relative to the checkout.
        start, end: the text, as offsets in the file's bytes.
        new: what stands there instead.
        first, last: lines of the statement, without the body of a compound one.
    """

    path: str
    start: int
    end: int
    new: str
    first: int
    last: int

    def apply(self, source: bytes) -> bytes:
        """Return the file's source with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def replacement(node: Any) -> tuple[Any, str] | None:
    """Return the node whose text changes and its new text, or None where nothing can change."""
    new: Any = copy.copy(node)
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
        new.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        new.ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        new = node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        new.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        new.value = node.value + 1
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        return node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and node.value is not None:
        return None if ast.unparse(node.value) == "None" else (node.value, "None")
    elif isinstance(node, ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        return node, "pass"
    else:
        return None
    return node, ast.unparse(new) if isinstance(node, ast.stmt) else f"({ast.unparse(new)})"


def mutants_of(root: Path, rooms: Sequence[str]) -> list[Mutant]:
    """List all mutants of the functions in the rooms' files."""
    found: list[Mutant] = []
    for path in sorted(file for room in rooms for file in (root / room).rglob("*.py")):
        source = path.read_bytes()
        starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]

        def walk(
            node: Any, statement: Any, path: Path = path, starts: Sequence[int] = starts
        ) -> None:
            if isinstance(node, ast.JoinedStr | ast.arguments):
                return  # positions inside of f-strings are wrong before Python 3.12
            inside = statement is not None
            if isinstance(node, ast.stmt) and inside:
                statement = node
            if statement is not None and (place := replacement(node)) is not None:
                at, new = place
                body = getattr(statement, "body", None)
                last = body[0].lineno - 1 if body else statement.end_lineno or 0
                found.append(
                    Mutant(
                        path.relative_to(root).as_posix(),
                        starts[at.lineno - 1] + at.col_offset,
                        starts[at.end_lineno - 1] + at.end_col_offset,
                        new,
                        statement.lineno,
                        max(statement.lineno, last),
                    )
                )
            function = isinstance(node, ast.FunctionDef)
            for name, value in ast.iter_fields(node):
                if name in ("annotation", "returns", "decorator_list"):
                    continue
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        walk(child, child if function else statement)

        walk(ast.parse(source), None)
    return found


# --- which tests run which line ------------------------------------------------------------------


def cover(root: Path, store: Path, tests: list[str], workers: str) -> None:
    """Run the tests under coverage.py; contexts and durations end in `store`."""
    store.mkdir(parents=True, exist_ok=True)
    config = store / "coveragerc"
    include = "".join(f"\n    {root}/{room}/*" for room in ROOMS)
    config.write_text(
        f"[run]\nparallel = true\ndata_file = {store}/data\npatch = subprocess, _exit\n"
        # A child process belongs to the test that started it.
        f"context = ${{PYTEST_CURRENT_TEST-}}\nsigterm = true\ninclude = {include}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "COVERED": str(store)}
    command = ["coverage", "run", f"--rcfile={config}", "-m", "pytest", "-p", "mutants", "-q"]
    options = ["-n", workers, "--dist", "loadfile", "-m", "not slow and not browser", *tests]
    subprocess.run([sys.executable, "-m", *command, *options], cwd=root, env=environment)
    combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={config}", "-q"]
    subprocess.run(combine, cwd=root, check=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count lines and CPU seconds for this test (this file is a plugin of `cover`)."""
    import coverage

    store = os.environ.get("COVERED")
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(item.nodeid)
    before = sum(os.times()[:4])
    yield
    if store:
        with (Path(store) / f"seconds-{os.getpid()}.jsonl").open("a") as out:
            out.write(json.dumps([item.nodeid, sum(os.times()[:4]) - before]) + "\n")


def tests_of_lines(store: Path, root: Path) -> tuple[dict[str, dict[int, set[str]]], Counter[str]]:
    """Return file -> line -> tests that run it, and the CPU seconds of each test."""
    import coverage

    seconds: Counter[str] = Counter()
    for file in store.glob("seconds-*.jsonl"):
        seconds.update(dict(map(json.loads, file.read_text().splitlines())))
    data = coverage.CoverageData(str(store / "data"))
    data.read()
    lines: dict[str, dict[int, set[str]]] = {}
    for path in data.measured_files():
        found = defaultdict(set)
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                # "test", or "|test", or in a child process "test (call)".
                test = context.strip("|").rsplit(" (", 1)[0]
                if test in seconds:
                    found[line].add(test)
        lines[Path(path).relative_to(root).as_posix()] = found
    return lines, seconds


# --- one mutant against its tests -----------------------------------------------------------------


def judge(mutant: Mutant, place: Path, tests: list[str], log: Path) -> str:
    """Run the tests on the mutant, in a copy of the checkout: killed, timeout or survived."""
    path = place / mutant.path
    source = path.read_bytes()
    path.write_bytes(mutant.apply(source))
    try:
        child = os.fork()
        if not child:
            _run_tests(place, tests, log)
        deadline = time.monotonic() + SECONDS
        while not (status := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "timeout"
            time.sleep(0.05)
        code = os.waitstatus_to_exitcode(status[1])
        return "killed" if code else "survived"
    finally:
        path.write_bytes(source)


def _run_tests(place: Path, tests: list[str], log: Path) -> None:
    """In the forked process: pytest in the copy; ends the process."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(place)
    sys.path[:] = [str(place), *(p for p in sys.path if p not in ("", str(Path(__file__).parent)))]
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(place)}
    os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))


def run(root: Path, store: Path, count: int, seed: int, workers: int) -> list[dict[str, Any]]:
    """Sample mutants and judge them; one row each."""
    import torch  # noqa: F401  every fork has them loaded

    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    everything = mutants_of(root, ROOMS)
    chosen = random.Random(seed).sample(everything, count)
    print(f"{count} of {len(everything)} mutants, seed {seed}", flush=True)
    lines, seconds = tests_of_lines(store, root)
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))

    def one(number: int, place: Path) -> dict[str, Any]:
        mutant = chosen[number]
        found = lines.get(mutant.path, {})
        tests = sorted(
            set().union(*(found.get(n, ()) for n in range(mutant.first, mutant.last + 1))),
            key=lambda test: seconds[test],
        )
        total, quick = 0.0, []
        for test in tests:
            total += seconds[test]
            if quick and total > ENOUGH:
                break
            quick.append(test)
        result = judge(mutant, place, quick, folder / f"{number}.log") if quick else "not run"
        old = (root / mutant.path).read_bytes()[mutant.start : mutant.end].decode()
        what = f"{' '.join(old.split())} -> {mutant.new}"
        print(f"{number:3} {result:9} {mutant.path}:{mutant.first}  {what}", flush=True)
        row = {"file": mutant.path, "line": mutant.first, "change": what}
        return row | {"tests": len(tests), "run": len(quick), "result": result}

    def share(worker: int) -> None:
        place = folder / f"checkout-{worker}"
        subprocess.run(["git", "clone", "-q", str(root), str(place)], check=True)
        rows = {number: one(number, place) for number in range(worker, count, workers)}
        (folder / f"{worker}.json").write_text(json.dumps(rows))
        shutil.rmtree(place)

    # No threads: a process with several must not be forked.
    children = []
    for worker in range(workers):
        children.append(os.fork())
        if not children[-1]:
            share(worker)
            os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    print(f"logs: {folder}")
    rows = {}
    for file in folder.glob("*.json"):
        rows |= json.loads(file.read_text())
    return [rows[number] for number in sorted(rows, key=int)]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["cover", "run"])
    parser.add_argument("--tests", nargs="+", default=["tests"], help="for `cover`")
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--store", type=Path, help="default: build/mutants in the checkout")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", type=Path, help="a CSV file for the rows")
    options = parser.parse_args()
    root = options.checkout.resolve()
    store = (options.store or root / "build" / "mutants").resolve()
    if options.what == "cover":
        cover(root, store, options.tests, str(options.workers))
        return
    rows = run(root, store, options.count, options.seed, options.workers)
    results = Counter(row["result"] for row in rows)
    killed = results["killed"] + results["timeout"]
    print(f"{dict(results)}: {killed} of {len(rows)} noticed, {killed / len(rows):.0%}")
    if options.save:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        with options.save.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
