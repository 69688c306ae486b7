import json

import nbformat
import pytest

from grader.grade import names
from grader.grade.assemble import assemble
from grader.grade.pristine import pristine_notebooks

STUB = (
    'def square(x):\n    """Return x times x."""\n'
    "    # YOUR CODE HERE\n    raise NotImplementedError\n"
)


@pytest.fixture
def put_together(hand_in, solved_folder):
    """Assemble a submission: what is known of it, and the sources of the notebook's cells."""

    def assembled(*args, **options):
        pristine = pristine_notebooks(solved_folder)["01-Powers"]
        made = assemble(pristine, hand_in(*args, **options))
        sockets = [f"/{number}.sock" for number in range(len(made.exercises))]
        text, numbers = made.notebook(made.exercises, "/started.sock", sockets, 5.0)
        cells = [cell["source"] for cell in json.loads(text)["cells"]]
        return made, cells, numbers

    return assembled


def test_only_solutions_run_and_after_each_the_grader_is_asked(put_together):
    made, cells, numbers = put_together()

    assert made.exercises == ("ex-1-1-square", "ex-1-2-cube")
    assert [c.splitlines()[0] for c in cells[1::2]] == ["def square(x):", "def cube(x):"]
    assert "/0.sock" in cells[2]
    assert "/1.sock" in cells[4]
    assert numbers == {"ex-1-1-square": [2], "ex-1-2-cube": [4]}
    assert not any("assert" in cell for cell in cells)


def test_hidden_tests_and_points_come_from_the_instructor(put_together, solved_folder):
    made, cells, _ = put_together()

    assert [(check.grade_id, check.points) for check in made.checks] == [
        ("ex-1-1-square-signs", 2),
        ("ex-1-1-square-five", 1),
        ("ex-1-2-cube-three", 2),
    ]
    assert "square(-4)" in made.checks[0].source
    assert not any("-4" in cell for cell in cells)


def test_own_helpers_come_along_and_scratch_cells_do_not(put_together):
    helper = (
        "table = {}\ntable['n'] = 2\nwaste = [0] * 10**12\n"
        "def power(x):\n    return x ** table['n']"
    )

    _, cells, _ = put_together("def square(x):\n    return power(x)", before=[helper])

    text = "\n".join(cells)
    assert "def power(x)" in text
    assert "table[" in text
    assert "waste" not in text


def test_of_the_instructors_cells_only_what_is_needed_runs(put_together):
    _, without, _ = put_together()
    _, needed, _ = put_together("def square(x):\n    return x ** base")

    assert not any("base, unused" in cell for cell in without)
    assert any("base, unused" in cell and "import math" in cell for cell in needed)


def test_a_helper_below_the_solution_is_found(put_together):
    _, cells, _ = put_together("def square(x):\n    return power(x)", after=["power = abs"])

    position = next(n for n, cell in enumerate(cells) if "power = abs" in cell)
    assert position < next(n for n, cell in enumerate(cells) if "/0.sock" in cell)


POWER = "def square(x):\n    return x ** POWER"


@pytest.mark.parametrize(
    ("cells", "square"),
    [
        (["from operator import mul as max"], "def square(x):\n    return max(x, x)"),
        (["from operator import *"], "def square(x):\n    return abs(pow(x, 2))"),
        (["POWERS = {}", "for k in 'a':\n    POWERS.update({k: 2})"],
         "def square(x):\n    return x ** POWERS['a']"),
        (["POWERS = {}", "def put(k, v):\n    POWERS[k] = v", "put('a', 2)"],
         "def square(x):\n    return x ** POWERS['a']"),
        (["POWERS = {}", "def put(k):\n    POWERS.update({k: 2})", "for k in 'a':\n    put(k)"],
         "def square(x):\n    return x ** POWERS['a']"),
        (["def setup(n):\n    global POWER\n    POWER = n", "setup(2)"], POWER),
        (["async def setup(n):\n    global POWER\n    POWER = n", "await setup(2)"], POWER),
        (["COUNT = 0", "def counted():\n    global COUNT\n    COUNT += 1\n    return 2"],
         "def square(x):\n    return x ** counted()"),
        (["import asyncio", "POWER = await asyncio.sleep(0, 2)"], POWER),
        (["POWER = 0\nasync for POWER in numbers():\n    pass"], POWER),
        (["POWERS = [i async for i in numbers()]"], "def square(x):\n    return x ** POWERS[0]"),
    ],
)  # fmt: skip
def test_what_a_solution_needs_of_other_cells_comes_along(put_together, cells, square):
    _, made, _ = put_together(square, before=cells)

    text = "\n".join(made)
    lines = [line.strip() for cell in cells for line in cell.split("\n")]
    assert [line for line in lines if line not in text] == []


def test_what_awaits_is_a_cell_of_its_own(put_together):
    _, cells, _ = put_together(POWER, before=["import asyncio\nPOWER = await asyncio.sleep(0, 2)"])

    assert "POWER = await asyncio.sleep(0, 2)" in cells


def test_a_name_of_pythons_that_a_later_scratch_cell_takes_stays_pythons(put_together):
    _, cells, _ = put_together(
        "def square(x):\n    return sum([x * x])", after=["sum = 0\nfor i in (1, 2):\n    sum += i"]
    )

    assert not any("sum = 0" in cell for cell in cells)


def test_own_experiments_with_a_needed_module_do_not_run(put_together):
    _, cells, _ = put_together(
        "def square(x):\n    return op.pow(x, 2)",
        before=["import operator as op", "def wait():\n    op.waste()", "wait()",
                "for i in range(10**12):\n    op.waste()"],
    )  # fmt: skip

    text = "\n".join(cells)
    assert "import operator as op" in text
    assert "waste" not in text


def test_a_future_import_is_kept_and_stands_above_all_that_it_is_for(put_together):
    square = "def square(x: Tensor) -> Tensor:\n    return x ** 2"
    _, cells, numbers = put_together(square, before=["from __future__ import annotations"])

    assert cells[1] == "from __future__ import annotations"
    assert cells[2] == square
    assert numbers["ex-1-1-square"] == [3]


def test_a_later_scratch_cell_does_not_replace_a_solution(put_together):
    _, cells, _ = put_together(after=["def square(x):\n    return 0"])

    assert not any("return 0" in cell for cell in cells)


def test_magics_are_left_out_but_not_from_strings(put_together):
    _, cells, _ = put_together('%%time\ndef square(x):\n    """\n%5\n"""\n    return x * x\n!ls')
    text = "\n".join(cells)

    assert "time" not in text.replace("itimer", "").replace("ITIMER", "").replace("timeout", "")
    assert "!ls" not in text


def test_an_untouched_or_missing_exercise_needs_no_kernel(put_together):
    made, _, _ = put_together(STUB, None)

    assert made.exercises == ()
    assert made.settled["ex-1-1-square"][0] == "not written"
    assert made.settled["ex-1-2-cube"][0] == "missing"


def test_a_syntax_error_is_named_and_takes_nothing_from_others(put_together):
    made, _, _ = put_together("def square(x) return x")

    assert made.exercises == ("ex-1-2-cube",)
    assert "SyntaxError" in made.settled["ex-1-1-square"][1]


def test_of_duplicates_the_first_that_was_written_counts(put_together, solved_folder):
    notebook = nbformat.read(solved_folder / "01-Powers.ipynb", as_version=4)
    place = next(n for n, c in enumerate(notebook.cells) if c.source.startswith("def square"))
    for text in ("def square(x):\n    return 2", "def square(x):\n    return 1"):
        copy = nbformat.from_dict(dict(notebook.cells[place]) | {"source": text})
        notebook.cells.insert(place, copy)
    notebook.cells.insert(place, nbformat.from_dict(dict(copy) | {"source": STUB}))

    made, cells, _ = put_together(notebook=notebook)

    assert "return 1" in "\n".join(cells)
    assert "return 2" not in "\n".join(cells)
    assert "duplicate" in [flag.kind for flag in made.flags]


@pytest.fixture
def split_in(put_together, solved_folder):
    """Assemble a submission whose first solution cell was split: each part has its grade_id."""

    def assembled(*parts):
        notebook = nbformat.read(solved_folder / "01-Powers.ipynb", as_version=4)
        place = next(n for n, c in enumerate(notebook.cells) if c.source.startswith("def square"))
        halves = [dict(notebook.cells[place]) | {"source": text} for text in parts]
        notebook.cells[place : place + 1] = [
            nbformat.from_dict(half | {"id": f"half-{number}"})
            for number, half in enumerate(halves)
        ]
        return put_together(notebook=notebook)

    return assembled


@pytest.mark.parametrize(
    "parts",
    [
        ("def square(x):\n    return power(x)", "def power(x):\n    return x**2"),
        ("def power(x):\n    return x**2", "def square(x):\n    return power(x)"),
        ("import math\ndef power(x):\n    return x**2",
         "import math\ndef square(x):\n    return power(x)"),
        ("two = 2", "%load_ext a\ndef power(x):\n    return x**two",
         "def square(x):\n    return power(x)"),
        ("", "def power(x):\n    return x**2", "def square(x):\n    return power(x)"),
    ],
)  # fmt: skip
def test_a_solution_cell_that_was_split_counts_with_all_its_parts(split_in, parts):
    made, cells, _ = split_in(*parts)

    text = "\n".join(cells)
    assert "def square(x)" in text
    assert "def power(x)" in text
    assert "def power(x)" in made.sources["ex-1-1-square"]
    assert "duplicate" in [flag.kind for flag in made.flags]


def test_what_was_split_off_and_is_no_python_takes_nothing_from_the_rest(split_in):
    made, cells, _ = split_in("def square(x):\n    return x", "so far so good")

    assert "def square(x)" in "\n".join(cells)
    assert "ex-1-1-square" in made.exercises


@pytest.mark.parametrize(
    "bomb",
    ["(" * 5000, "x = " + "-" * 100_000 + "1", "a" + ".b" * 100_000, "x = [" * 900 + "]" * 900,
     "\x00", "x = " + "1+" * 60_000 + "1"],
)  # fmt: skip
def test_text_that_would_break_a_parser_is_only_unparsable(bomb):
    with pytest.raises(names.UnparsableError):
        names.statements(bomb)


@pytest.mark.parametrize(
    ("source", "free"),
    [
        ("def f(x):\n    y = x\n    return y + z", {"z"}),
        ("f = lambda a, b=c: a + b", {"c"}),
        (
            "class A(Base):\n    n = m\n    def f(self):\n        return self.n + k",
            {"Base", "m", "k"},
        ),
        ("x = [i for i in range(n)]", {"n"}),
        ("import torch\nfrom a.b import c as d\ntorch.x(d)", set()),
        ("def f(n):\n    return f(n - 1) if n else one", {"one"}),
        ("@jit\ndef f(): pass", {"jit"}),
    ],
)
def test_free_names_are_those_that_python_would_look_up(source, free):
    assert names.free_names(source) == free
