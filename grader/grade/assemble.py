"""From a submission to a notebook that can run: the student's solutions in the lab's frame.

What runs is made of texts only: the solution cells, found by their grade_id; what these need of
the student's other cells; and what both need of the instructor's. Nothing else of the submission,
no metadata, no output, no check cell. After each exercise comes a cell of ours that asks the
grader for work, so that its checks see the names as they stood there, as in the notebook.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from grader.grade import names
from grader.grade.magics import without_magics
from grader.grade.names import Statement, UnparsableError
from grader.grade.pristine import Pristine, PristineCell
from grader.grade.reading import Cell
from grader.grade.results import Flag
from grader.grade.submissions import Submission
from grader.grade.units import (
    Unit,
    bare,
    closure,
    future_imports,
    packed,
    setup_units,
    unit_of,
)
from labsupport.course.editions import CODE_STUB, TEXT_STUB, regions

FAILURES = "_labsupport_failures"


@dataclass(frozen=True)
class Check:
    """One check cell of the instructor's.

    Attributes:
        grade_id: its own.
        exercise: the solution cell's.
        points: what it is worth.
        source: its text, hidden tests too.
        needs: names that it uses, which the student's kernel has to have.
        by_hand: whether it is an answer that a person judges.
    """

    grade_id: str
    exercise: str
    points: float
    source: str
    needs: tuple[str, ...] = ()
    by_hand: bool = False


@dataclass(frozen=True)
class Assembled:
    """What is to be run, and what is known before.

    Attributes:
        checks: all of the instructor's, in order.
        exercises: those that can be run, in the order of the student's notebook.
        settled: of those that cannot: (status, message), by grade_id of the exercise.
        sources: what would run for each exercise, of the student's; for `source_rules`.
        flags: for manual review.
    """

    checks: tuple[Check, ...]
    exercises: tuple[str, ...]
    settled: dict[str, tuple[str, str]]
    sources: dict[str, str]
    flags: tuple[Flag, ...]
    _units: tuple[Unit, ...] = field(repr=False, default=())
    _setup: tuple[Unit, ...] = field(repr=False, default=())

    def notebook(
        self, exercises: Sequence[str], started: str, sockets: Sequence[str], cell_timeout_s: float
    ) -> tuple[str, dict[str, list[int]]]:
        """The notebook that runs some exercises.

        Args:
            exercises: grade_ids, from `self.exercises` and in their order.
            started: the path of a socket where the kernel calls before the first cell.
            sockets: a path for each; the exercise asks there for work.
            cell_timeout_s: for each cell.

        Returns:
            the file's text, and which of its cells (counted from 1) are for which exercise.
        """
        cells = [
            "from grader.grade.inside import watch_cells\n"
            f"{FAILURES} = watch_cells(get_ipython(), {cell_timeout_s!r}, {started!r})"
        ]
        numbers: dict[str, list[int]] = {}
        done: set[int] = set()
        units = (*self._setup, *self._units)
        cells += future_imports(unit for unit in units if not unit.exercise)
        for exercise, socket in zip(exercises, sockets, strict=True):
            chosen = self._chosen(exercise) - done
            done |= chosen
            early, late = self._order(sorted(chosen))
            first = len(cells)
            cells += packed([units[number] for number in early])
            cells += packed([units[number] for number in late])
            numbers[exercise] = list(range(first + 1, len(cells) + 1))
            cells.append(
                "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\n"
                "from grader.handover.worker import serve\n"
                f"serve(globals(), {socket!r})"
            )
        return _file(cells), numbers

    def _chosen(self, exercise: str) -> set[int]:
        wanted = {
            name for check in self.checks if check.exercise == exercise for name in check.needs
        }
        return closure(exercise, wanted, self._setup, self._units)

    def _order(self, chosen: list[int]) -> tuple[list[int], list[int]]:
        """What can run at once, and what of the lab's own needs the student's functions first."""
        units, border = (*self._setup, *self._units), len(self._setup)
        theirs = {n for number in chosen if number >= border for n in units[number].binds}
        late: list[int] = []
        for number in chosen:
            if number < border and units[number].needs & theirs:
                late.append(number)
                theirs |= units[number].binds
        return [number for number in chosen if number not in late], late


def assemble(pristine: Pristine, submission: Submission) -> Assembled:
    """Put a student's solutions into the instructor's notebook.

    Args:
        pristine: the solved notebook.
        submission: what the student handed in.
    """
    flags: list[Flag] = []
    found = {
        name: _solution_cell(name, cell, pristine, submission.cells, flags)
        for name, cell in pristine.solutions.items()
    }
    settled: dict[str, tuple[str, str]] = {}
    taken: dict[int, str] = {}
    for name, position in found.items():
        if position is None:
            settled[name] = ("missing", "its cell is not in the notebook")
        elif _is_stub(submission.cells[position].source, pristine.solutions[name].source):
            settled[name] = ("not written", "the exercise was handed in as it was given")
        if position is not None:
            taken[position] = name
    units = _students_units(pristine, submission.cells, taken, settled)
    runnable = [unit.exercise for unit in units if unit.exercise and unit.exercise not in settled]
    checks = tuple(_checks(pristine))
    setup = setup_units(pristine)
    sources = {}
    for name in runnable:
        wanted = {need for check in checks if check.exercise == name for need in check.needs}
        chosen = closure(name, wanted, setup, units)
        theirs = [units[n - len(setup)].text for n in sorted(chosen) if n >= len(setup)]
        sources[name] = "\n\n".join(theirs)
    for check in checks:
        if check.by_hand:
            settled[check.grade_id] = _by_hand(check, pristine, submission.cells, flags)
    return Assembled(
        checks, tuple(runnable), settled, sources, tuple(flags), tuple(units), tuple(setup)
    )


@lru_cache(maxsize=32)
def _checks(pristine: Pristine) -> tuple[Check, ...]:
    made = []
    for name, cell in pristine.graded.items():
        exercise, needs = pristine.exercise_of(name), ()
        if not cell.by_hand:
            needs = tuple(sorted(names.free_names(cell.source) - {"checks"}))
        made.append(Check(name, exercise, cell.points, cell.source, needs, cell.by_hand))
    return tuple(made)


def _solution_cell(
    name: str,
    pristine_cell: PristineCell,
    pristine: Pristine,
    cells: Sequence[Cell],
    flags: list[Flag],
) -> int | None:
    """Where the student's solution of an exercise stands; None if nowhere."""
    same = [number for number, cell in enumerate(cells) if cell.grade_id == name]
    code = [number for number in same if cells[number].kind == "code"]
    if same and not code:
        flags.append(Flag(name, "not code", "Its cell is text in the submission, not code."))
    if len(code) > 1:
        flags.append(
            Flag(name, "duplicate", f"{len(code)} cells say that they are this exercise; the first "
                 "that is not as it was given counts, and what was split off it.")
        )  # fmt: skip
    written = [n for n in code if not _is_stub(cells[n].source, pristine_cell.source)]
    if code:
        chosen = (written or code)[0]
        if "### BEGIN SOLUTION" in cells[chosen].source:
            text = "Its cell holds the markers of the instructor's notebook, which no student gets."
            flags.append(Flag(name, "instructor's text", text))
        return chosen
    # Some programs drop what they do not know from a notebook's metadata: then the names tell.
    known = {cell.grade_id for cell in pristine.cells if cell.grade_id}
    defined = names.bound_names(pristine_cell.source)
    for number in reversed(range(len(cells))):
        cell = cells[number]
        if cell.kind != "code" or cell.grade_id in known:
            continue
        try:
            if defined and defined <= names.bound_names(without_magics(cell.source)):
                text = "Its cell has lost its grade_id and was found by the names that it defines."
                flags.append(Flag(name, "found by name", text))
                return number
        except UnparsableError:
            continue
    return None


def _stub_of(source: str) -> str:
    """A solution cell as students get it."""
    cut = {number for _, number, _ in regions(source)}
    lines, inside = [], False
    for number, line in enumerate(source.split("\n"), start=1):
        if "### BEGIN SOLUTION" in line:
            lines.append(CODE_STUB)
            inside = True
        elif inside and "### END SOLUTION" in line:
            inside = False
        elif number not in cut:
            lines.append(line)
    return "\n".join(lines)


def _is_stub(source: str, pristine_source: str) -> bool:
    def lines_of(text: str) -> list[str]:
        return [line.strip() for line in text.split("\n") if line.strip()]

    return not source.strip() or lines_of(source) == lines_of(_stub_of(pristine_source))


def _students_units(
    pristine: Pristine,
    cells: Sequence[Cell],
    taken: dict[int, str],
    settled: dict[str, tuple[str, str]],
) -> list[Unit]:
    known = {cell.grade_id for cell in pristine.cells if cell.grade_id}
    given = {bare(unit.text) for unit in setup_units(pristine)}
    chosen = {name: cells[position] for position, name in taken.items()}
    units: list[Unit] = []
    for position, cell in enumerate(cells):
        exercise = taken.get(position, "")
        if cell.kind != "code":
            continue
        if not exercise and cell.grade_id in known and not _split_off(cell, chosen, pristine):
            continue
        text = without_magics(cell.source)
        try:
            if exercise:
                parts = names.statements(text)
                bound = frozenset().union(*(one.binds for one in parts))
                needs = _needs_of(parts, units) - bound
                units.append(Unit(text, bound, needs, exercise=exercise, cell=position))
                units += [unit_of(one, position) for one in parts if one.star]
            else:
                parts = names.statements(text)
                units += [unit_of(one, position) for one in parts if bare(one.text) not in given]
        except UnparsableError as error:
            if exercise:
                settled.setdefault(exercise, ("failed", f"its cell is not Python: {error}"))
    return units


def _needs_of(parts: Sequence[Statement], above: Sequence[Unit]) -> frozenset[str]:
    """What a solution cell looks up; builtins only where a cell above it may have replaced them."""
    needs = frozenset().union(*(one.needs for one in parts))
    builtin = needs & names.BUILTINS
    if builtin and any(one.star for one in above):
        needs |= {"*"}  # a name that nobody binds, for which all that a star imports is taken
    return needs - builtin.difference(*(one.binds for one in above))


def _split_off(cell: Cell, chosen: dict[str, Cell], pristine: Pristine) -> bool:
    """Whether a cell was split off a solution, and is no second one: both carry the grade_id."""
    if cell.grade_id not in chosen:
        return False
    texts = (chosen[cell.grade_id].source, cell.source, pristine.solutions[cell.grade_id].source)
    try:
        bound = [names.bound_names(without_magics(text)) for text in texts]
    except UnparsableError:
        return False
    # Both may hold the same import.
    return not set.intersection(*bound)


def _by_hand(
    check: Check, pristine: Pristine, cells: Sequence[Cell], flags: list[Flag]
) -> tuple[str, str]:
    """What became of a written answer: never points, but word to the instructor."""
    answer = next((c.source for c in cells if c.grade_id == check.grade_id), None)
    if answer is None:
        return "missing", "its cell is not in the notebook"
    if answer.strip() in ("", TEXT_STUB):
        return "not written", "nothing was written"
    flags.append(Flag(check.grade_id, "by hand", "A written answer: read it and give the points."))
    return "not run", "to be graded by hand"


def _file(cells: Sequence[str]) -> str:
    made = [
        {
            "cell_type": "code",
            "id": f"cell-{number}",
            "metadata": {},
            "source": text,
            "outputs": [],
            "execution_count": None,
        }
        for number, text in enumerate(cells, start=1)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps(
        {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    )
