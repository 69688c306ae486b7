import nbformat
import pytest

from grader.grade.plan import make_plan, names_of
from grader.grade.submissions import pristine_notebooks

STUB = (
    'def square(x):\n    """Return x times x."""\n'
    "    # YOUR CODE HERE\n    raise NotImplementedError\n"
)


@pytest.fixture
def plan(hand_in, solved_folder):
    def made(*args, **options):
        pristine = pristine_notebooks(solved_folder)["01-Powers"]
        return make_plan(pristine, hand_in(*args, **options))

    return made


def texts(plan):
    return [step.source for step in plan.steps if step.source]


def test_the_students_cells_run_in_their_order_and_checks_do_not(plan):
    own = ["own = 1", "print(own)"]
    made = plan(before=[own[0]], after=[own[1]])
    assert [text.split("(")[0] for text in texts(made)] == [
        "own = 1", "def square", "def cube", "print",
    ]  # fmt: skip


def test_of_the_given_cells_only_what_is_needed_runs(plan):
    given = "import math\n\nbase, unused = 2, math.tau"
    assert given not in texts(plan())
    assert given in texts(plan("def square(x):\n    return x ** base"))
    assert given in texts(plan(before=["print(unused)"]))


def test_a_cell_that_the_student_changed_is_the_students(plan):
    made = plan(before=["import math\n\nbase, unused = 3, math.tau"])
    assert any("= 3," in text for text in texts(made))


def test_an_untouched_or_missing_exercise_is_known(plan):
    made = plan(STUB, None)
    assert made.absent["ex-1-1-square"][0] == "not written"
    assert made.absent["ex-1-2-cube"][0] == "missing"


def test_two_cells_of_one_exercise_run_both_and_carry_a_flag(plan, solved_folder):
    notebook = nbformat.read(solved_folder / "01-Powers.ipynb", as_version=4)
    place = next(n for n, c in enumerate(notebook.cells) if c.source.startswith("def square"))
    copy = nbformat.from_dict(dict(notebook.cells[place]) | {"source": "def square(x): return 1"})
    notebook.cells.insert(place, copy)
    made = plan(notebook=notebook)
    assert sum(step.exercise == "ex-1-1-square" for step in made.steps) == 2
    assert {"duplicate", "instructor's text"} == {flag.kind for flag in made.flags}


@pytest.mark.parametrize(
    ("square", "kinds"),
    [
        ("def square(x):\n    return x * x", []),
        ("# mine\n\ndef square( x ) :\n  'Short.'\n  y = x\n  return y*y", []),
        ("def square(x, y=1):\n    return x * x", ["given lines changed"]),
        ("square = lambda x: x * x", ["given lines changed"]),
        ("no python", []),
        ("x = 1" + " + 1" * 3000, []),
    ],
    ids=range(6),
)
def test_given_lines_that_are_changed_or_gone_carry_a_flag(plan, square, kinds):
    assert [flag.kind for flag in plan(square).flags] == kinds


@pytest.mark.parametrize(
    ("source", "loaded", "bound"),
    [
        ("def f(x):\n    y = x\n    return y + z", "z", "f"),
        ("x = [i for i in range(n)]", "n", "x"),
        ("import torch\nfrom a.b import c as d\ntorch.x(d)", "torch d", "torch d"),
        ("@jit\ndef f(): pass", "jit", "f"),
        ("def f():\n    global n\n    n = 1", "", "f n"),
        ("y = %time square(3)\n%time x = cube(3)\n!ls\n?torch", "square cube", "x y"),
        ("x = await sleep(y)", "sleep y", "x"),
        ("no python here", "", ""),
        ("(" * 5000, "", ""),
    ],
    ids=range(9),
)
def test_names_are_those_that_python_looks_up_and_binds(source, loaded, bound):
    assert names_of(source) == (set(loaded.split()), set(bound.split()))
