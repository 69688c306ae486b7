import random

import numpy as np
import pytest

from labsupport import checks
from labsupport.checks import choosing
from labsupport.checks.verdict import mutant
from tests.checks.solutions import broken, diagnosis, each, solution_source

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


@pytest.mark.parametrize("seed", [0, 1])
@each(
    (LIMITS, choosing.choice, choosing.LIMIT_MISTAKES),
    (TIES, choosing.choice, choosing.TIE_MISTAKES),
    (SOURCES, choosing.choice, choosing.SOURCE_MISTAKES + choosing.LIMIT_MISTAKES[:1]),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said, seed):
    def choose(table, *, memory_bytes, dtype):
        return student(table.to_dict("records"), memory_bytes, dtype)

    assert said in diagnosis(check, choose, seed=seed)


LAST = 'return tied.loc[tied.peak_memory_bytes.idxmin(), "backend"]'
OTHERS = {
    "a row": ((LAST, "return tied.loc[tied.peak_memory_bytes.idxmin()]"), "a Series of shape (6,): return the name in its column"),
    "a row's label": ((LAST, "return tied.peak_memory_bytes.idxmin()"), "a row's label or its time"),
    "a list": ((LAST, f"return [{LAST.removeprefix('return ')}]"), "return the name itself"),
    "a column": ((LAST, 'return tied.nsmallest(1, "ms")["backend"]'), "return the name itself"),
    "a pair": ((LAST, LAST + ", tied.ms.min()"), "return the name itself"),
    "a set": ((LAST, f"return {{{LAST.removeprefix('return ')}}}"), "a set: return the name of a backend, or None"),
    "a time": ((LAST, "return tied.ms.min().item()"), "its time; the name stands in"),
    "no answer for nothing": (("    if rows.empty:\n        return None\n", ""), "where no row is left your function fails (ValueError"),
    "a text for nothing": (("return None", 'return "standard"'), "Nothing is left here: return None"),
    "a refusal": (("return None", 'raise ValueError("nothing fits")'), "return None then"),
    "the table changed": (("    rows = table[", "    table['ms'] = table.ms.fillna(math.inf)\n    rows = table["), "the table was changed"),
    "no return": ((LAST, LAST.removeprefix("return ")), "you choose None"),
    "something else": ((LAST, 'return tied.sort_values("backend").iloc[-1]["backend"]'), "is right"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_choice_is_refused(change, said):
    check = TIES if said == "is right" else LIMITS
    assert said in diagnosis(check, solved(change))


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
        ({}, choosing.LIMIT_MISTAKES),
        ({"close": True}, choosing.TIE_MISTAKES + choosing.LIMIT_MISTAKES),
        ({"sources": True}, choosing.SOURCE_MISTAKES + choosing.LIMIT_MISTAKES),
    ):
        tables = choosing.telling(random.Random(seed), some, **kinds)
        choices = [choosing.choice, *(mutant(choosing.choice, one.edit) for one in some)]
        answers = {tuple(choice(*table) for table in tables) for choice in choices}
        assert len(answers) == len(some) + 1


def test_no_table_hangs_on_rounding():
    """Times of rows that may run are never within a thousandth of the 5%."""
    draw, no_ties = random.Random(0), mutant(choosing.choice, choosing.TIE_MISTAKES[0].edit)
    for _ in range(200):
        rows, _, dtype = workload = choosing._workload(draw, close=True)
        if (best := no_ties(*workload)) is None:
            continue
        fastest = min(row["ms"] for row in rows if row["backend"] == best and row["dtype"] == dtype)
        for row in rows:
            if row["dtype"] == dtype:
                assert not 1.049 < row["ms"] / fastest < 1.051
