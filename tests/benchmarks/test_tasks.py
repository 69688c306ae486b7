"""The command, and its one table of numbers."""

import pandas as pd
import pytest

from benchmarks.tasks import long_form, main


def test_each_number_becomes_a_row_under_its_keys():
    table = pd.DataFrame(
        {"window": [8, 16], "sites": ["all", "new"], "model": [0.5, 1.0], "count": [4, 2]}
    )
    long = long_form("code", table, ["window", "sites"])
    assert set(long.columns) == {"task", "window", "sites", "measure", "value"}
    found = {(row.window, row.sites, row.measure): row.value for row in long.itertuples()}
    assert found == {
        (8, "all", "model"): 0.5,
        (16, "new", "model"): 1.0,
        (8, "all", "count"): 4,
        (16, "new", "count"): 2,
    }


def test_a_task_that_is_none_is_refused_before_a_model_is_loaded(capsys):
    with pytest.raises(SystemExit):
        main(["--tasks", "code,poems", "--model", "no such model"])
    assert "no task is called poems; there are windows, document, code, summary" in (
        capsys.readouterr().err
    )
