import base64
import math

import matplotlib
import pandas as pd
import pytest

from labsupport import plotting


def make_table(directions=("forward",), recorded=False):
    rows = [
        {"backend": backend, "seqlen": seqlen, "direction": direction, "status": "ok", "batch": 1,
         "heads": 4, "head_dim": 64, "dtype": "float32", "causal": False, "median_ms": seqlen / 100,
         "q1_ms": seqlen / 110, "q3_ms": seqlen / 90, "peak_memory_bytes": seqlen * 2**20}
        for direction in directions
        for backend in ("standard", "sdpa_flash")
        for seqlen in (512, 1024, 2048)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    lost = (table["backend"] == "standard") & (table["seqlen"] == 2048)
    table.loc[lost, ["median_ms", "q1_ms", "q3_ms", "peak_memory_bytes"]] = math.nan
    table.loc[lost, "status"] = "out of memory"
    table.attrs["provenance"] = {"device": "Some GPU", "date": "2026-02-03T04:05:06+00:00"}
    if recorded:
        table.attrs["provenance"] |= {"recorded": True, "run": "old"}
    return table


def lines(figure, gid=None):
    return {x.get_label(): x for x in figure.axes[0].get_lines() if x.get_gid() == gid}


@pytest.mark.parametrize(
    ("plot", "unit", "values"),
    [
        (plotting.plot_time, "(ms)", [5.12, 10.24, 20.48]),
        (plotting.plot_memory, "(MiB)", [512, 1024, 2048]),
    ],
)
def test_a_chart_shows_the_numbers_of_the_table_in_its_unit(plot, unit, values):
    figure = plot(make_table(), title="A finding")
    drawn = lines(figure)
    assert set(drawn) == {"standard", "sdpa_flash"}
    assert list(drawn["standard"].get_xdata()) == [512, 1024]
    assert list(drawn["sdpa_flash"].get_ydata()) == values
    assert unit in figure.axes[0].get_ylabel()
    assert figure.get_suptitle() == "A finding"
    (cross,) = lines(figure, "out of memory").values()
    assert list(cross.get_xdata()) == [2048]
    assert [text.get_text() for text in figure.axes[0].texts] == ["standard: out of memory"]


def test_recorded_runs_are_dashed_and_references_may_depend_on_the_length():
    references = [
        plotting.Reference("limit", lambda n: 2.0 * n), plotting.Reference("constant", 3.0)
    ]  # fmt: skip
    recorded = make_table(recorded=True)
    figure = plotting.plot_time(recorded, references=references, title="Recorded")
    styles = {label: line.get_linestyle() for label, line in lines(figure).items()}
    assert styles == {"standard (recorded)": "--", "sdpa_flash (recorded)": "--"}
    assert "recorded run old" in figure.get_supxlabel()
    drawn = {label: list(line.get_ydata()) for label, line in lines(figure, "reference").items()}
    assert drawn == {"limit": [1024.0, 2048.0, 4096.0], "constant": [3.0, 3.0, 3.0]}


def test_directions_get_a_panel_each_and_mixed_shapes_and_double_rows_are_refused():
    table = make_table(directions=("forward", "forward+backward"))
    first, second = plotting.plot_time(table, title="Two").axes
    assert [x.get_title(loc="left") for x in (first, second)] == ["forward", "forward+backward"]
    assert first.get_ylim() == second.get_ylim()
    for bad, message in (
        (pd.concat([table, table.assign(dtype="bfloat16")]), "mixes dtype = bfloat16, float32"),
        (pd.concat([table, table]), "two rows"),
        (table.drop(columns="median_ms"), "lacks median_ms"),
    ):
        with pytest.raises(ValueError, match=message):
            plotting.plot_time(bad, title="x")


def test_a_chart_is_a_png_and_words_and_needs_no_display():
    before = matplotlib.get_backend()
    bundle = plotting.plot_time(make_table(), title="Flash wins")._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert matplotlib.get_backend() == before
    assert bundle["text/plain"] == (
        "Flash wins. time (ms) against sequence length (tokens, 1K = 1024), both logarithmic. "
        "standard: 5.12 at 512, 10.2 at 1024. sdpa_flash: 5.12 at 512, 20.5 at 2048. "
        "standard: out of memory at 2048."
    )


# --- predictions beside measurements --------------------------------------------------------------


def test_each_device_has_its_time_its_interval_and_its_bound():
    rows = [("H200", 2.0, 1.5, 2.6, 0.5, 1.9), ("A100", 6.0, 3.0, 12.0, 1.8, math.nan)]
    names = ["device", "ms", "low_ms", "high_ms", "bound_ms", "measured_ms"]
    table = pd.DataFrame(rows, columns=names)
    figure = plotting.plot_predictions(table, title="A finding.", small_print="where")
    (intervals,) = figure.axes[0].collections
    ends = [(first[0], last[0]) for first, last in intervals.get_segments()]
    assert ends == [(1.5, 2.6), (3.0, 12.0)]
    assert list(lines(figure)["predicted"].get_xdata()) == [2.0, 6.0]
    (bound,) = lines(figure, "reference").values()
    assert list(bound.get_xdata()) == [0.5, 1.8]
    assert plotting.alt_text(figure) == (
        "A finding. H200: 2 ms, from 1.5 to 2.6, at least 0.5, measured 1.9; "
        "A100: 6 ms, from 3 to 12, at least 1.8"
    )


# --- dtypes and magnitudes from layer to layer ----------------------------------------------------


def make_flow(layers=2, measured=True, nan_from=None):
    """Return a precision tracker's table for a model of `layers` pairs of norm and linear layer."""
    calls = [(f"model.layers.{i}.{part}", part) for i in range(layers) for part in ("norm", "up")]
    rows = []
    for order, (name, part) in enumerate([*calls, *reversed(calls)]):
        backward = order >= len(calls)
        bad = nan_from is not None and not backward and order >= nan_from
        rows.append(
            {
                "order": order, "pass": "backward" if backward else "forward", "name": name,
                "class": part.title(), "kind": "module", "call": 0,
                "dtype_in": "" if backward else "float32, int64" if part == "norm" else "float32",
                "dtype_weights": "" if backward else "bfloat16, float32", "dtype_out": "bfloat16",
                "largest": 8.0, "smallest": 1e-6, "nan": float(bad), "inf": 0.0,
            }
        )  # fmt: skip
    frame = pd.DataFrame(rows)
    return frame if measured else frame.assign(largest=math.nan, smallest=math.nan, nan=math.nan)


def test_the_flow_shows_each_dtype_in_its_place_and_magnitudes_from_smallest_to_largest():
    figure, drawn = plotting.plot_dtype_flow(make_flow(nan_from=2), title="A finding"), {}
    for patch in figure.axes[0].patches:
        place = round(patch.get_x() + 0.46), round(patch.get_y() + 0.2)  # column and strip
        drawn.setdefault(place, []).append(patch.get_gid())
    assert drawn[0, 0] == ["float32"]  # not the positions beside it
    assert drawn[0, 1] == ["bfloat16", "float32"]
    assert drawn[3, 2] == drawn[3, 3] == ["bfloat16"]
    assert len(drawn) == 4 * 4
    ranges = figure.axes[1]
    bars = {bar.get_gid(): bar.get_segments() for bar in ranges.collections}
    assert [segment[:, 1].tolist() for segment in bars["forward"]] == [[1e-6, 8.0]] * 4
    assert len(bars["backward"]) == 4
    marks = {line.get_gid(): line for line in ranges.get_lines()}
    assert list(marks["forward nan"].get_xdata()) == [2, 3]
    references = [x.get_ydata()[0] for x in ranges.get_lines() if x.get_gid() == "reference"]
    assert references == [65504.0, 2.0**-14, 2.0**-24]
    assert "NaN in 2 of them, first model.layers.1.norm." in plotting.alt_text(figure)


def test_minus_infinity_out_of_a_log_softmax_is_no_alarm():
    frame = make_flow().assign(inf=3.0, minus_inf=3.0)
    frame = frame[frame["pass"] == "forward"]
    for name, alarm in (("Linear", True), ("LogSoftmax", False)):
        words = plotting.plot_dtype_flow(frame.assign(**{"class": name}), title="x").description
        assert ("Infinity" in words) == alarm
    with pytest.raises(ValueError, match="no forward call"):
        plotting.plot_dtype_flow(frame.iloc[:0], title="x")


def test_growth_is_drawn_beside_a_line_in_proportion():
    table = pd.DataFrame({"what": ["heads"] * 3 + ["batch"] * 2, "work": [1, 4, 16, 1, 4]})
    chart = plotting.plot_growth(table.assign(time=[1.0, 1.1, 4.0, 1.0, 4.0]), title="Growth")
    lines = {line.get_label(): line.get_xydata().tolist() for line in chart.axes[0].get_lines()}
    assert lines["in proportion"] == [[1, 1], [16, 16]]
    assert lines["heads"] == [[1, 1], [4, 1.1], [16, 4]]
    assert lines["batch"] == [[1, 1], [4, 4]]
