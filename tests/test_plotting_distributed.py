"""Charts of several devices: a ring's steps, who computes when, what more devices bring."""

import math

import pandas as pd
import pytest
from matplotlib.colors import to_hex

from labsupport.distributed.ring.plan import Plan
from labsupport.plotting import (
    Reference,
    alt_text,
    plot_ring_steps,
    plot_scaling,
    plot_timeline,
    style,
)

BLUE = "#0072b2"


def schedule(layout, plan):
    return [
        {"layout": layout, "rank": r, "step": s, "owner": plan.owner(r, way), "pairs": pairs}
        for r in range(plan.world_size)
        for s, (way, pairs) in enumerate(zip(plan.route, plan.pairs(r), strict=True))
    ]


@pytest.fixture
def steps():
    rows = schedule("contiguous", Plan.of(4, 64, causal=True))
    rows += schedule("zigzag", Plan.of(4, 64, causal=True, zigzag=True))
    return pd.DataFrame(rows)


@pytest.fixture
def recorded():
    """As `labsupport ring bench` writes it: two layouts, one case that could not run."""
    rows = []
    for world in (1, 2, 4, 8):
        for layout, best in (("contiguous", world / (2 * world - 1)), ("zigzag", 1.0)):
            for direction in ("forward", "forward and backward"):
                rows.append((world, f"native, {layout}", direction, 0.9 * best))
        rows.append((world, "fa4, zigzag", "forward", 0.8))
        rows.append((world, "fa4, zigzag", "forward and backward", math.nan))
    return pd.DataFrame(rows, columns=["world", "who", "direction", "efficiency"])


def filled(axes):
    return [
        box.get_height() for box in axes.patches if to_hex(box.get_facecolor()) == BLUE
    ]  # fmt: skip


def test_a_cell_is_filled_as_far_as_its_block_is_visible(steps):
    contiguous, zigzag = plot_ring_steps(steps, block=64**2, title="x").axes
    assert sorted({round(height / 0.92, 1) for height in filled(contiguous)}) == [0.0, 0.5, 1.0]
    assert {round(height / 0.92, 1) for height in filled(zigzag)} == {0.5}


def test_the_time_of_a_ring_is_that_of_its_fullest_cells(steps):
    figure = plot_ring_steps(steps, block=64**2, title="Zigzag is fair")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["contiguous: 3.5 blocks of time", "zigzag: 2 blocks of time"]
    assert "contiguous: the steps last 0.51, 1, 1, 1 blocks" in alt_text(figure)


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


def test_efficiency_is_drawn_by_devices_with_what_can_be_had_at_best(recorded):
    figure = plot_scaling(
        recorded, column="efficiency", series="who", panel="direction", title="x", ylabel="y",
        references=[Reference("ideal", 1.0), Reference("contiguous", lambda w: w / (2 * w - 1))],
    )  # fmt: skip
    forward, both = figure.axes
    lines = {line.get_label(): list(line.get_ydata()) for line in forward.get_lines()}
    assert lines["contiguous"] == pytest.approx([1, 2 / 3, 4 / 7, 8 / 15])
    assert lines["native, zigzag"] == pytest.approx([0.9] * 4)
    assert forward.get_ylim() == (0, 1.05)
    labels = [line.get_label() for line in both.get_lines()]
    assert "fa4, zigzag" not in labels  # it never ran there
    assert "forward, native, contiguous: 0.9 on 1, 0.6 on 2" in alt_text(figure)


def test_an_implementation_has_its_colour_and_its_second_layout_is_dashed(recorded):
    figure = plot_scaling(
        recorded, column="efficiency", series="who", panel="direction", title="x", ylabel="y"
    )
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    native = [lines["native, contiguous"], lines["native, zigzag"]]
    assert [line.get_color() for line in native] == [style("sdpa_flash")[0]] * 2
    assert [line.get_linestyle() for line in native] == ["-", "--"]
    assert lines["fa4, zigzag"].get_color() == style("fa4")[0]


def test_points_that_lie_on_each_other_are_refused(recorded):
    with pytest.raises(ValueError, match="same who, world"):
        plot_scaling(recorded, column="efficiency", series="who", title="x", ylabel="y")
    with pytest.raises(ValueError, match="no row"):
        plot_scaling(recorded[:0], column="efficiency", series="who", title="x", ylabel="y")
