"""Charts of the performance analysis: predictions beside measurements."""

import math

import pandas as pd
import pytest

from labsupport.plotting import alt_text, plot_predictions


@pytest.fixture
def table():
    rows = [("H200", 2.0, 1.5, 2.6, 0.5, 1.9), ("A100", 6.0, 3.0, 12.0, 1.8, math.nan)]
    names = ["device", "ms", "low_ms", "high_ms", "bound_ms", "measured_ms"]
    return pd.DataFrame(rows, columns=names)


def line(figure, label):
    (found,) = (one for one in figure.axes[0].get_lines() if one.get_label() == label)
    return list(found.get_xdata())


def test_each_device_has_its_time_its_interval_and_its_bound(table):
    figure = plot_predictions(table, title="t")
    (intervals,) = figure.axes[0].collections
    ends = [(first[0], last[0]) for first, last in intervals.get_segments()]
    assert ends == [(1.5, 2.6), (3.0, 12.0)]
    assert line(figure, "predicted") == [2.0, 6.0]
    assert line(figure, "least time by the specification") == [0.5, 1.8]


def test_the_description_says_every_number(table):
    words = alt_text(plot_predictions(table, title="A finding.", small_print="where"))
    assert words.startswith("A finding. ")
    assert "H200: 2 ms, from 1.5 to 2.6, at least 0.5, measured 1.9" in words
    assert "A100: 6 ms, from 3 to 12, at least 1.8" in words
    assert "nan" not in words


def test_an_empty_table_is_refused(table):
    with pytest.raises(ValueError, match="no prediction"):
        plot_predictions(table.iloc[:0], title="t")
