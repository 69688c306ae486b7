import random

import numpy as np
import pytest

from labsupport import checks
from labsupport.checks import choosing
from labsupport.checks.choosing_mistakes import LIMIT_MISTAKES as LIMIT_TEXTS
from labsupport.checks.choosing_mistakes import SOURCE_MISTAKES as SOURCE_TEXTS
from labsupport.checks.choosing_mistakes import TIE_MISTAKES as TIE_TEXTS
from labsupport.checks.choosing_mistakes import choice
from tests.checks.solutions import broken, diagnosis, solution_source

LIMITS, TIES, SOURCES = ALL = (
    checks.check_choice_limits,
    checks.check_choice_ties,
    checks.check_choice_sources,
)


def source():
    return solution_source("04", "ex-4-5-choose")


def solved(*changes):
    return broken(source(), "choose", *changes)


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("seed", [0, 5, 31])
def test_the_solution_passes(check, seed, capsys):
    check(solved(), seed=seed)
    assert capsys.readouterr().out.startswith("[ok]")


@pytest.mark.parametrize("check", ALL)
def test_the_labs_own_function_passes(check):
    check(checks.choose)


@pytest.mark.parametrize("check", ALL)
def test_another_right_way_passes(check):
    """Row by row, without pandas; the name as numpy's text."""

    def choose(table, *, memory_bytes, dtype):
        known = {}
        for row in sorted(table.to_dict("records"), key=lambda row: row["source"], reverse=True):
            if row["dtype"] == dtype:
                known[row["backend"]] = row  # predicted ones first, measured ones over them
        left = [
            (row["ms"], row["peak_memory_bytes"], name)
            for name, row in known.items()
            if row["status"] == "ok" and row["peak_memory_bytes"] <= memory_bytes
        ]
        if left:
            limit = min(left)[0] * 1.05
            return np.str_(min((size, name) for ms, size, name in left if ms <= limit)[1])
        return None

    check(choose)


FITS = " & (rows.peak_memory_bytes <= memory_bytes)"
OVERRULED = '(rows.source == "measured") | ~rows.backend.isin(measured)'
LAST = 'return tied.loc[tied.peak_memory_bytes.idxmin(), "backend"]'
LIMIT_LINE = '    rows = rows[(rows.status == "ok")' + FITS + "]\n"
OVERRULED_LINES = (
    f'    measured = rows[rows.source == "measured"].backend\n    rows = rows[{OVERRULED}]\n'
)
LIMIT_MISTAKES = {
    "status ignored": ([('(rows.status == "ok") & ', "")], "`status` is ignored"),
    "dtype ignored": ([('table[table["dtype"] == dtype]', "table")], "`dtype` is ignored"),
    "memory ignored": ([(FITS, "")], "`memory_bytes` is ignored"),
    "strict": ([("<= memory_bytes", "< memory_bytes")], "<=, not <"),
    "fastest or nothing": (
        [(LIMIT_LINE, "    rows = rows[rows.ms == rows.ms.min()]\n" + LIMIT_LINE)],
        "Leave out first, then choose",
    ),
    "slowest": ([(LAST, 'return rows.loc[rows.ms.idxmax(), "backend"]')], "less is better"),
    "leanest": ([("1.05 * rows.ms.min()", "math.inf")], "Speed decides"),
    "most memory": ([("1.05 * rows.ms.min()", "math.inf"), ("idxmin", "idxmax")], "most memory"),
    "first row": ([(LAST, 'return rows.iloc[0]["backend"]')], "rows are in no order"),
    "a row": ([(LAST, "return tied.loc[tied.peak_memory_bytes.idxmin()]")], "a Series of shape (6,): return the name in its column"),
    "a row's label": ([(LAST, "return tied.peak_memory_bytes.idxmin()")], "a row's label or its time"),
    "a list": ([(LAST, f"return [{LAST.removeprefix('return ')}]")], "return the name itself"),
    "a column": ([(LAST, 'return tied.nsmallest(1, "ms")["backend"]')], "return the name itself"),
    "a pair": ([(LAST, LAST + ", tied.ms.min()")], "return the name itself"),
    "a set": ([(LAST, f"return {{{LAST.removeprefix('return ')}}}")], "a set: return the name of a backend, or None"),
    "a time": ([(LAST, "return tied.ms.min().item()")], "its time; the name stands in"),
    "no answer for nothing": ([("    if rows.empty:\n        return None\n", "")], "where no row is left your function fails (ValueError"),
    "a text for nothing": ([("return None", 'return "standard"')], "Nothing is left here: return None"),
    "a refusal": ([("return None", 'raise ValueError("nothing fits")')], "return None then"),
    "the table changed": ([("    rows = table[", "    table['ms'] = table.ms.fillna(math.inf)\n    rows = table[")], "the table was changed"),
    "no return": ([(LAST, LAST.removeprefix("return "))], "you choose None"),
}  # fmt: skip
TIE_MISTAKES = {
    "no ties": ([("1.05 * ", "")], "You take the fastest"),
    "fastest of all": (
        [('rows = table[table["dtype"] == dtype]', 'rows = table[table["dtype"] == dtype]\n    limit = 1.05 * rows.ms.min()'),
         ("rows[rows.ms <= 1.05 * rows.ms.min()]", "rows[rows.ms <= max(limit, rows.ms.min())]")],
        "is that of the rows that are left",
    ),
    "chain": (
        [("tied = rows[rows.ms <= 1.05 * rows.ms.min()]",
          "ordered = rows.sort_values('ms')\n    near = (ordered.ms <= 1.05 * ordered.ms.shift().fillna(math.inf)).cummin()\n    tied = ordered[near]")],
        "not from one row to the next",
    ),
    "narrow": ([("1.05", "1.02")], "Yours is narrower"),
    "wide": ([("1.05", "1.1")], "Yours is wider"),
    "slowest of the tie": ([("tied.peak_memory_bytes.idxmin()", "tied.ms.idxmax()")], "you take the slowest"),
    "most memory of the tie": ([("idxmin", "idxmax")], "you take the most memory"),
    "product": ([(LAST, 'return rows.loc[(rows.ms * rows.peak_memory_bytes).idxmin(), "backend"]')], "You minimise ms * memory"),
    "something else": ([(LAST, 'return tied.sort_values("backend").iloc[-1]["backend"]')], "is right"),
}  # fmt: skip
SOURCE_MISTAKES = {
    "measured only": ([(OVERRULED, 'rows.source == "measured"')], "left out altogether"),
    "predicted only": ([(OVERRULED, 'rows.source == "predicted"')], "predictions only"),
    "source ignored": ([(OVERRULED, "rows.ms == rows.ms")], "`source` is ignored"),
    "predicted overrules": ([('"measured"', '"predicted"')], "the other way round"),
    "filtered first": ([(OVERRULED_LINES, ""), (LIMIT_LINE, LIMIT_LINE + OVERRULED_LINES)], "comes back by its prediction"),
    "no predictions if any": ([("~rows.backend.isin(measured)", "measured.empty")], "Ask it for each backend"),
    "any dtype": ([('rows[rows.source == "measured"].backend', 'table[table.source == "measured"].backend')], "take the rows of the dtype first"),
    "status ignored": ([('(rows.status == "ok") & ', "")], "`status` is ignored"),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), LIMIT_MISTAKES.values(), ids=LIMIT_MISTAKES)
def test_each_mistake_about_limits_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(LIMITS, solved(*changes), seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), TIE_MISTAKES.values(), ids=TIE_MISTAKES)
def test_each_mistake_about_ties_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(TIES, solved(*changes), seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("changes", "said"), SOURCE_MISTAKES.values(), ids=SOURCE_MISTAKES)
def test_each_mistake_about_sources_gets_its_own_diagnosis(changes, said, seed):
    assert said in diagnosis(SOURCES, solved(*changes), seed=seed)


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("seed", range(4))
def test_a_favourite_does_not_pass(check, seed):
    for favourite in (*choosing.BACKENDS, None):
        diagnosis(check, lambda table, favourite=favourite, **limits: favourite, seed=seed)


@pytest.mark.parametrize("check", ALL)
def test_a_stub_is_called_one(check):
    def choose(table, **limits):
        raise NotImplementedError

    assert "not written yet" in diagnosis(check, choose)


def test_a_function_that_stumbles_is_named():
    def picks(table):
        return table.backend[0]

    message = diagnosis(LIMITS, picks)
    assert "picks raised TypeError" in message
    assert "dtype='" in message


@pytest.mark.parametrize("seed", range(6))
def test_the_tables_tell_all_mistakes_apart(seed):
    for kinds, some in (
        ({}, LIMIT_TEXTS),
        ({"close": True}, TIE_TEXTS | LIMIT_TEXTS),
        ({"sources": True}, SOURCE_TEXTS | LIMIT_TEXTS),
    ):
        tables = choosing.telling(random.Random(seed), some, **kinds)
        answers = {tuple(choice(table, name) for table in tables) for name in ("", *some)}
        assert len(answers) == len(some) + 1


def test_no_table_hangs_on_rounding():
    """Times of rows that may run are never within a thousandth of the 5%."""
    draw = random.Random(0)
    for _ in range(200):
        rows, _, dtype = workload = choosing._workload(draw, close=True)
        if (best := choice(workload, "no ties")) is None:
            continue
        fastest = min(row["ms"] for row in rows if row["backend"] == best and row["dtype"] == dtype)
        for row in rows:
            if row["dtype"] == dtype:
                assert not 1.049 < row["ms"] / fastest < 1.051
