"""Cells with IPython's own lines, as they are read: nothing of theirs runs, the rest stays."""

import ast
import contextlib

import pytest

from grader.grade import names
from grader.grade.magics import without_magics


def same(text, expected):
    return ast.dump(ast.parse(text)) == ast.dump(ast.parse(expected))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("%load_ext a\nx = 1  # why?", "pass\nx = 1"),
        ("try:\n    import a\nexcept ImportError:\n    !pip install a",
         "try:\n    import a\nexcept ImportError:\n    pass"),
        ("%time x = 2", "x = 2"),
        ("%time x = 2  # note", "x = 2"),
        ("for i in n:\n    %time x = i", "for i in n:\n    x = i"),
        ("%time for i in n: f(i)", "for i in n: f(i)"),
        ("%time %time x = 1", "x = 1"),
        ("%time !ls", "pass"),
        ("out = %time sum(range(10))\nx = 2", "out = sum(range(10))\nx = 2"),
        ("out = %time sum(n)  # note", "out = sum(n)"),
        ("%timeit -n 3 -r1 f(x)", "f(x)"),
        ("%timeit x = 3", "pass"),
        ("out = %timeit -o f(x)", "out = None"),
        ("files = !ls\n?f\nf??\n%cd a", "files = None\npass\npass\npass"),
        ("?\nx = 1\nwhat's this?", "pass\nx = 1\npass"),
        ("    x = 1\n    y = 2", "x = 1\ny = 2"),
        ("    %%time\n    x = 1", "x = 1"),
        ("%%time\n%%capture out\nx = 1\n%ls", "x = 1\npass"),
        ("%%timeit y = 3\nx = 1", "x = 1"),
        ("%%bash\necho hello", ""),
        ("%%writefile a.py\nx = 1", ""),
        ("# note\n%%time\nx = 1", "pass\nx = 1"),
        ("x = 'é'; é = 1\r\n%ls\r\ny = 2", "x = 'é'; é = 1\npass\ny = 2"),
        ("f(get_ipython().system(get_ipython().getoutput('ls')))\n!ls", "f(None)\npass"),
        (">>> x = 1\n>>> y = 2", "x = 1\ny = 2"),
    ],
)  # fmt: skip
def test_magics_are_taken_out_and_what_python_there_is_stays(source, expected):
    text = without_magics(source)

    assert same(text, expected), text
    assert "get_ipython" not in text


@pytest.mark.parametrize(
    "source", ["x = '''\n%ls\n'''", "x = (7\n%y)", "get_ipython().system('a')"]
)
def test_text_that_is_python_stays_as_it_is(source):
    assert without_magics(source) == source


@pytest.mark.parametrize(
    "source", ["\n\n%ls\nif x:\n    !ls\nlast = 1", "\n%%time\n\n%ls\nx = 2\nlast = 1"]
)
def test_lines_keep_their_numbers(source):
    text = without_magics(source)

    assert ast.parse(text).body[-1].lineno == 1 + source.count("\n")


@pytest.mark.parametrize("source", ["def f(x) return x", "%ls\nthis is no Python", "%%time\nx = ("])
def test_what_is_no_python_is_refused_with_its_reason(source):
    with pytest.raises(names.UnparsableError, match="SyntaxError"):
        names.statements(without_magics(source))


@pytest.mark.parametrize("source", ["!a\n" * 5_000, "a" * 100_000 + " !b?", "*" * 100_000 + "-?"])
def test_text_that_would_keep_ipython_busy_is_not_given_to_it(source):
    assert without_magics(source) == source


@pytest.mark.parametrize(
    "source",
    ["%time " * 10_000 + "x", "(" * 50_000 + "\n%ls", "%time a" + ".b" * 20_000, "\x00\n%ls",
     "\ud800\n%ls", "out = %time " + "-" * 20_000 + "1", "a.b." * 200 + "c\n%ls"],
)  # fmt: skip
def test_text_that_would_break_ipython_or_a_parser_is_at_most_unparsable(source):
    with contextlib.suppress(names.UnparsableError):
        names.statements(without_magics(source))
