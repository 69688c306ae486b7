"""Charts of training: what fills the memory, how losses run, what more context or devices bring."""

import pandas as pd
from matplotlib.colors import to_hex

from labsupport.plotting import (
    Reference,
    alt_text,
    plot_by_window,
    plot_launches,
    plot_memory_parts,
    plot_timeline,
)

MIB, BLUE = 2**20, "#0072b2"


def parts_of(rows):
    table = pd.DataFrame(rows, columns=["case", "part", "bytes"])
    return table.assign(bytes=table["bytes"] * MIB)


PARTS = parts_of(
    [("standard", "scores", 900), ("standard", "weights", 100), ("flash", "weights", 100)]
)


def data_of(axes):
    return {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}


def bars(figure):
    return sorted(
        (round(bar.get_x()), round(bar.get_width()), to_hex(bar.get_facecolor()))
        for bar in figure.axes[0].patches
        if bar.get_width()
    )


def test_the_bars_are_cut_into_parts_that_add_up_beside_what_was_measured_and_is_allowed():
    figure = plot_memory_parts(
        PARTS, title="x", measured={"flash": 96 * MIB}, limit=("allowed: 512 MiB", 512 * MIB)
    )
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["standard", "flash"]
    assert [bar[:2] for bar in bars(figure)] == [(0, 100), (0, 900), (900, 100)]
    assert "(MiB)" in axes.get_xlabel()
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
    assert lines == {"measured": [96.0], "allowed: 512 MiB": [512.0, 512.0]}
    words = alt_text(figure)
    assert "standard: 1e+03 MiB; flash: 100 MiB. Measured: flash: 96 MiB" in words

    # Many small ones are drawn as one.
    drawn = bars(plot_memory_parts(parts_of([("a", f"{n}", 20 - n) for n in range(20)]), title="x"))
    assert len(drawn) == len({colour for _, _, colour in drawn}) == 7
    assert sum(width for _, width, _ in drawn) == sum(range(1, 21))


def test_scores_are_drawn_against_the_window():
    table = pd.DataFrame({"window": [512, 128], "right": [1.0, 0.2], "search": [1.0, 0.3]})
    references = [Reference("guessing", 0.01), Reference("visible", lambda w: w / 512)]
    figure = plot_by_window(
        table, {"right": "the model", "search": "a search"}, title="More context, more answers",
        ylabel="share of right answers", unit="bytes", references=references,
    )  # fmt: skip
    assert data_of(figure.axes[0]) == {
        "the model": [0.2, 1.0], "a search": [0.3, 1.0],
        "guessing": [0.01, 0.01], "visible": [0.25, 1.0],
    }  # fmt: skip
    assert figure.axes[0].get_xlabel() == "context that the model sees (bytes)"
    assert "the model: 0.2 at " in alt_text(figure)


# --- several devices ------------------------------------------------------------------------------


def test_spans_are_bars_by_rank_and_kind():
    rows = [("zigzag", 0, "compute", 0.0, 8.0), ("zigzag", 0, "message", 1.0, 5.0),
            ("zigzag", 1, "compute", 0.5, 3.0), ("zigzag", 1, "compute", 4.0, 9.0)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["layout", "rank", "what", "start_ms", "end_ms"])
    figure = plot_timeline(table, title="Both end together")
    (axes,) = figure.axes
    bars = [path for group in axes.collections for path in group.get_paths()]
    spans = sorted((p.vertices[:, 0].min(), p.vertices[:, 0].max()) for p in bars)
    assert spans == [(0.0, 8.0), (0.5, 3.0), (1.0, 5.0), (4.0, 9.0)]
    assert axes.get_title(loc="left") == "zigzag: 9 ms"
    assert "(ms)" in axes.get_xlabel()
    assert "rank 1: computes for 8 ms" in alt_text(figure)


def test_kernels_are_bars_by_call_and_stream():
    rows = [("a", 0.0, 2.0, 7), ("a", 5.0, 4.0, 7), ("b", 1.0, 3.0, 7), ("b", 0.0, 6.0, 13)]
    table = pd.DataFrame(rows, columns=["call", "start_us", "duration_us", "stream"])
    figure = plot_launches(table, title="The GPU waits")
    bars = [
        (path.vertices[:, 0].min(), path.vertices[:, 0].max())
        for axes in figure.axes
        for group in axes.collections
        for path in group.get_paths()
    ]
    assert bars == [(0.0, 2.0), (5.0, 9.0), (1.0, 4.0), (0.0, 6.0)]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a: 9 µs", "b: 6 µs"]
    assert "b: 2 kernels in 6 µs." in alt_text(figure)
