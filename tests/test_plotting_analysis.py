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


def test_devices_stand_from_above_to_below_on_a_logarithmic_axis_in_ms(table):
    axes = plot_predictions(table, title="t").axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["H200", "A100"]
    assert axes.yaxis_inverted()
    assert axes.get_xscale() == "log"
    assert "ms" in axes.get_xlabel()


def test_without_a_measurement_or_a_bound_there_is_no_mark_for_it(table):
    figure = plot_predictions(table.drop(columns=["bound_ms", "measured_ms"]), title="t")
    labels = {one.get_label() for one in figure.axes[0].get_lines()}
    assert "measured" not in labels
    assert "least time by the specification" not in labels


def test_the_description_says_every_number(table):
    words = alt_text(plot_predictions(table, title="A finding.", small_print="where"))
    assert words.startswith("A finding. ")
    assert "H200: 2 ms, from 1.5 to 2.6, at least 0.5, measured 1.9" in words
    assert "A100: 6 ms, from 3 to 12, at least 1.8" in words
    assert "nan" not in words


@pytest.mark.parametrize("column", ["device", "ms", "low_ms", "high_ms"])
def test_a_missing_column_is_named(table, column):
    with pytest.raises(ValueError, match=column):
        plot_predictions(table.drop(columns=column), title="t")


def test_an_empty_table_is_refused(table):
    with pytest.raises(ValueError, match="no prediction"):
        plot_predictions(table.iloc[:0], title="t")
