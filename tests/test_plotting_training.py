"""Charts of training: what fills the memory, how losses run, what a longer context brings."""

import math

import pandas as pd
import pytest
from matplotlib.colors import to_hex

from labsupport.plotting import (
    Reference,
    alt_text,
    plot_by_window,
    plot_memory_parts,
    plot_runs,
)

MIB = 2**20


@pytest.fixture
def parts():
    rows = [("standard", "scores", 900), ("standard", "weights", 100), ("flash", "weights", 100)]
    table = pd.DataFrame(rows, columns=["case", "part", "bytes"])
    return table.assign(bytes=table["bytes"] * MIB)


@pytest.fixture
def courses():
    rows = [
        (backend, seed, step, 5.0 - step + 0.001 * n)
        for n, (backend, seed) in enumerate([("standard", 0), ("sdpa_flash", 0), ("standard", 1)])
        for step in range(4)
    ]
    return pd.DataFrame(rows, columns=["backend", "seed", "step", "loss"])


def bars(figure):
    return [
        (to_hex(bar.get_facecolor()), bar.get_x(), bar.get_width())
        for bar in figure.axes[0].patches
        if bar.get_width()
    ]


def test_the_bars_are_cut_into_parts_that_add_up(parts):
    figure = plot_memory_parts(parts, title="Scores fill the memory")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["standard", "flash"]
    widths = sorted((round(x), round(width)) for _, x, width in bars(figure))
    assert widths == [(0, 100), (0, 900), (900, 100)]
    assert "(MiB)" in figure.axes[0].get_xlabel()
    assert "standard: 1e+03 MiB; flash: 100 MiB" in alt_text(figure)


def test_what_was_measured_and_what_is_allowed_are_marked(parts):
    figure = plot_memory_parts(
        parts, title="x", measured={"flash": 96 * MIB}, limit=("allowed: 512 MiB", 512 * MIB)
    )
    labels = {line.get_label(): line.get_xdata() for line in figure.axes[0].get_lines()}
    assert list(labels["measured"]) == [96.0]
    assert list(labels["allowed: 512 MiB"]) == [512.0, 512.0]
    assert "Measured: flash: 96 MiB" in alt_text(figure)


def test_many_small_parts_are_drawn_as_one():
    rows = [("a", f"part {n}", (20 - n) * MIB) for n in range(20)]
    figure = plot_memory_parts(pd.DataFrame(rows, columns=["case", "part", "bytes"]), title="x")
    assert len(bars(figure)) == 7
    assert sum(width for _, _, width in bars(figure)) == pytest.approx(sum(range(1, 21)))
    assert len({colour for colour, _, _ in bars(figure)}) == 7


def test_courses_are_drawn_with_their_distance_from_the_first(courses):
    figure = plot_runs(courses, title="They agree")
    upper, lower = figure.axes
    assert [line.get_label() for line in upper.get_lines()] == [
        "standard, seed 0", "sdpa_flash, seed 0", "standard, seed 1"
    ]  # fmt: skip
    distances = [line.get_ydata()[0] for line in lower.get_lines()]
    assert distances == pytest.approx([0.001, 0.002])
    assert lower.get_yscale() == "log"
    assert "sdpa_flash, seed 0 is at most 1.0e-03 from standard, seed 0; equal" in alt_text(figure)


def test_the_same_implementation_has_its_colour_and_another_seed_is_grey(courses):
    figure = plot_runs(courses, title="x")
    colours = [line.get_color() for line in figure.axes[0].get_lines()]
    assert colours == ["#000000", "#0072B2", "#808080"]


def test_a_run_that_agrees_to_the_bit_leaves_no_line_at_minus_infinity(courses):
    courses["loss"] = 5.0
    figure = plot_runs(courses, title="x")
    figure.savefig("/dev/null", format="png")
    assert all(math.isnan(y) for line in figure.axes[1].get_lines() for y in line.get_ydata())
    assert "at most 0.0e+00" in alt_text(figure)


def test_scores_are_drawn_against_the_window():
    table = pd.DataFrame({"window": [512, 128], "right": [1.0, 0.2], "search": [1.0, 0.3]})
    figure = plot_by_window(
        table,
        {"right": "the model", "search": "a search"},
        title="More context, more answers",
        ylabel="share of right answers",
        unit="bytes",
        references=[Reference("guessing", 0.01), Reference("visible", lambda w: w / 512)],
    )
    axes = figure.axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines == {
        "the model": [0.2, 1.0], "a search": [0.3, 1.0],
        "guessing": [0.01, 0.01], "visible": [0.25, 1.0],
    }  # fmt: skip
    assert axes.get_xlabel() == "context that the model sees (bytes)"
    assert "the model: 0.2 at first, 1 at last" in alt_text(figure)


def test_nothing_to_draw_or_to_compare_is_refused(parts, courses):
    with pytest.raises(ValueError, match="no part"):
        plot_memory_parts(parts.iloc[:0], title="x")
    with pytest.raises(ValueError, match="one run"):
        plot_runs(courses[courses.seed == 1], title="x")
