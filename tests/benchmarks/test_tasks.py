"""The command, and its one table of numbers."""

from argparse import Namespace

import pandas as pd

from benchmarks.tasks import long_form, show


def test_each_number_becomes_a_row_under_its_keys_and_is_shown_as_a_table():
    table = pd.DataFrame(
        {"window": [8, 16], "sites": ["all", "new"], "model": [0.5, 1.0], "count": [4, 2]}
    )
    long = long_form("code", table)
    assert set(long.columns) == {"task", "window", "sites", "measure", "value"}
    found = {(row.window, row.sites, row.measure): row.value for row in long.itertuples()}
    assert found == {
        (8, "all", "model"): 0.5,
        (16, "new", "model"): 1.0,
        (8, "all", "count"): 4,
        (16, "new", "count"): 2,
    }
    long.attrs["summaries"] = ["A text."]
    text, header, *rows = show(long, Namespace()).replace("\n\n", "\n").splitlines()
    assert text == "A text."
    assert header.split()[-4:] == ["window", "sites", "count", "model"]
    assert [row.split() for row in rows] == [
        ["8", "all", "4.0", "0.5"],
        ["16", "new", "2.0", "1.0"],
    ]
