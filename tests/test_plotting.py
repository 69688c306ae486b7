import base64
import itertools
import math

import matplotlib
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from labsupport import plotting

BACKENDS = [
    "standard", "flash_torch", "flash_triton", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn",
    "sdpa_math", "flex", "fa2", "fa4", "xformers",
]  # fmt: skip


def make_table(directions=("forward",), recorded=False, **columns):
    rows = [
        {
            "backend": backend,
            "seqlen": seqlen,
            "direction": direction,
            "status": "out of memory" if lost else "ok",
            "batch": 1,
            "heads": 4,
            "head_dim": 64,
            "dtype": "float32",
            "causal": False,
            "median_ms": math.nan if lost else seqlen / 100,
            "q1_ms": math.nan if lost else seqlen / 110,
            "q3_ms": math.nan if lost else seqlen / 90,
            "peak_memory_bytes": math.nan if lost else seqlen * 2**20,
            "max_error": math.nan if lost else 1e-6,
            "speedup": math.nan if lost else 2.0,
            **columns,
        }
        for direction in directions
        for backend in ("standard", "sdpa_flash")
        for seqlen in (512, 1024, 2048)
        for lost in [backend == "standard" and seqlen == 2048]
    ]
    table = pd.DataFrame(rows)
    table.attrs["provenance"] = {"device": "Some GPU", "date": "2026-02-03T04:05:06+00:00"}
    if recorded:
        table.attrs["provenance"] |= {"recorded": True, "run": "old"}
    return table


def lines(figure, gid=None):
    return [line for line in figure.axes[0].get_lines() if line.get_gid() == gid]


def test_every_implementation_has_its_own_colour_and_marker():
    styles = [plotting.style(name) for name in BACKENDS]
    assert set(BACKENDS) == set(plotting.STYLES)
    assert len({colour for colour, _ in styles}) == len(BACKENDS)
    assert len({marker for _, marker in styles}) == len(BACKENDS)


@pytest.mark.parametrize(
    ("plot", "scale", "unit"),
    [
        (plotting.plot_time, 1 / 100, "(ms)"),
        (plotting.plot_memory, 1, "(MiB)"),
        (plotting.plot_error, None, "error"),
        (plotting.plot_speedup, None, "standard"),
    ],
)
def test_a_chart_shows_the_numbers_of_the_table_in_its_unit(plot, scale, unit):
    figure = plot(make_table(), title="A finding")
    drawn = {line.get_label(): line for line in lines(figure)}
    assert set(drawn) == {"standard", "sdpa_flash"}
    assert list(drawn["standard"].get_xdata()) == [512, 1024]
    if scale is not None:
        assert list(drawn["sdpa_flash"].get_ydata()) == [n * scale for n in (512, 1024, 2048)]
    assert unit in figure.axes[0].get_ylabel()
    assert figure.get_suptitle() == "A finding"


@pytest.mark.parametrize("ratio", [2, 60, 10**6])
def test_an_axis_of_values_has_three_labels_to_ten(ratio):
    table = make_table()
    table["median_ms"] = [12.0 * ratio ** (i / 5) for i in range(6)]
    table["status"] = "ok"
    figure = plotting.plot_time(table, title="A finding")
    low, high = figure.axes[0].get_ylim()
    labels = [y for y in figure.axes[0].get_yticks() if low <= y <= high]
    assert (2 if ratio == 2 else 3) <= len(labels) <= 10


def test_a_lost_case_is_a_labelled_cross_at_its_length():
    figure = plotting.plot_time(make_table(), title="A finding")
    (cross,) = lines(figure, "out of memory")
    assert list(cross.get_xdata()) == [2048]
    assert [text.get_text() for text in figure.axes[0].texts] == ["standard: out of memory"]


def test_recorded_runs_are_dashed_and_say_so():
    figure = plotting.plot_time(make_table(), recorded=make_table(recorded=True), title="Both")
    styles = {line.get_label(): line.get_linestyle() for line in lines(figure)}
    assert styles["sdpa_flash"] == "-"
    assert styles["sdpa_flash (recorded)"] == "--"
    assert "recorded run old" in figure.get_supxlabel()
    alone = plotting.plot_time(make_table(recorded=True), title="Recorded alone")
    assert {line.get_label() for line in lines(alone)} == {
        "standard (recorded)",
        "sdpa_flash (recorded)",
    }


def test_reference_lines_may_depend_on_the_length():
    references = [
        plotting.Reference("limit", lambda n: 2.0 * n),
        plotting.Reference("constant", 3.0),
    ]
    figure = plotting.plot_time(make_table(), references=references, title="A finding")
    drawn = {line.get_label(): list(line.get_ydata()) for line in lines(figure, "reference")}
    assert drawn == {"limit": [1024.0, 2048.0, 4096.0], "constant": [3.0, 3.0, 3.0]}


def test_directions_get_a_panel_each_with_one_axis_of_values():
    table = make_table(directions=("forward", "forward+backward"))
    figure = plotting.plot_time(table, title="Two")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["forward", "forward+backward"]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_mixed_shapes_and_double_rows_are_refused():
    table = make_table()
    with pytest.raises(ValueError, match="mixes dtype = bfloat16, float32"):
        plotting.plot_time(pd.concat([table, table.assign(dtype="bfloat16")]), title="x")
    with pytest.raises(ValueError, match="two rows"):
        plotting.plot_time(pd.concat([table, table]), title="x")
    with pytest.raises(ValueError, match="lacks median_ms"):
        plotting.plot_time(table.drop(columns="median_ms"), title="x")


def test_the_alt_text_tells_what_the_chart_shows():
    figure = plotting.plot_time(make_table(), title="Flash wins")
    text = plotting.alt_text(figure)
    assert text.startswith("Flash wins. ")
    assert "time (ms) against sequence length" in text
    assert "sdpa_flash: 5.12 at 512, 20.5 at 2048." in text
    assert "standard: out of memory at 2048." in text


def test_drawing_needs_no_display_and_leaves_the_backend_alone(tmp_path):
    before = matplotlib.get_backend()
    plotting.plot_memory(make_table(), title="A finding").savefig(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
    assert matplotlib.get_backend() == before


def test_a_chart_shows_itself_as_a_png_and_describes_itself_in_words():
    bundle = plotting.plot_time(make_table(), title="A finding")._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert bundle["text/plain"].startswith("A finding.")


def test_the_picture_of_tiles_counts_what_the_causal_mask_leaves():
    figure = plotting.plot_tiles(seqlen_q=4, seqlen_k=4, block_q=1, block_k=1)
    assert "10 tiles computed" in figure.description
    assert "6 tiles skipped" in figure.description
    unmasked = plotting.plot_tiles(seqlen_q=4, seqlen_k=6, block_q=2, block_k=4, causal=False)
    assert "4 tiles computed" in unmasked.description
    assert "0 tiles skipped" in unmasked.description


def make_flow(layers=2, measured=True, nan_from=None):
    """What a precision tracker returns for a model of `layers` pairs of norm and linear layer."""
    calls = [(f"model.layers.{i}.{part}", part) for i in range(layers) for part in ("norm", "up")]
    rows = []
    for order, (name, part) in enumerate([*calls, *reversed(calls)]):
        backward = order >= len(calls)
        place = calls.index((name, part))
        bad = nan_from is not None and not backward and place >= nan_from
        rows.append(
            {
                "order": order,
                "pass": "backward" if backward else "forward",
                "name": name,
                "class": part.title(),
                "kind": "module",
                "call": 0,
                "dtype_in": "" if backward else "float32, int64" if part == "norm" else "float32",
                "dtype_weights": "" if backward else "bfloat16, float32",
                "dtype_out": "bfloat16",
                "largest": 8.0 if measured else math.nan,
                "smallest": 1e-6 if measured else math.nan,
                "nan": float(bad) if measured else math.nan,
                "inf": 0.0 if measured else math.nan,
            }
        )
    return pd.DataFrame(rows)


def cells(figure):
    """(column, strip) -> the dtypes drawn there."""
    found = {}
    for patch in figure.axes[0].patches:
        place = round(patch.get_x() + 0.46), round(patch.get_y() + 0.2)
        found.setdefault(place, []).append(patch.get_gid())
    return found


def test_the_flow_of_dtypes_shows_each_dtype_in_its_place():
    drawn = cells(plotting.plot_dtype_flow(make_flow(), title="A finding"))
    assert drawn[0, 0] == ["float32"]  # not the positions beside it
    assert drawn[0, 1] == ["bfloat16", "float32"]
    assert drawn[3, 2] == drawn[3, 3] == ["bfloat16"]
    assert len(drawn) == 4 * 4


def test_the_flow_of_magnitudes_reaches_from_smallest_to_largest():
    figure = plotting.plot_dtype_flow(make_flow(), title="A finding")
    _, ranges = figure.axes
    bars = {bar.get_gid(): bar.get_segments() for bar in ranges.collections}
    assert [segment[:, 1].tolist() for segment in bars["forward"]] == [[1e-6, 8.0]] * 4
    assert len(bars["backward"]) == 4
    references = [line.get_ydata()[0] for line in ranges.get_lines() if line.get_gid()]
    assert {65504.0, 2.0**-14, 2.0**-24} <= set(references)
    assert ranges.get_yscale() == "log"


def test_nan_is_marked_from_the_layer_where_it_begins():
    figure = plotting.plot_dtype_flow(make_flow(nan_from=2), title="A finding")
    (marks,) = [line for line in figure.axes[1].get_lines() if line.get_gid() == "forward nan"]
    assert list(marks.get_xdata()) == [2, 3]
    assert "NaN in 2 of them, first model.layers.1.norm." in plotting.alt_text(figure)


def test_minus_infinity_out_of_a_log_softmax_is_no_alarm():
    frame = make_flow().assign(inf=3.0, minus_inf=3.0)
    frame = frame[frame["pass"] == "forward"]
    assert "Infinity" in plotting.plot_dtype_flow(frame, title="x").description
    softmax = frame.assign(**{"class": "LogSoftmax"})
    assert "Infinity" not in plotting.plot_dtype_flow(softmax, title="x").description


@pytest.mark.parametrize("layers", [1, 13, 126])
@pytest.mark.parametrize("measured", [True, False])
def test_labels_have_room_whatever_the_number_of_layers(layers, measured, recwarn):
    frame = make_flow(layers=layers, measured=measured)
    forward = frame[frame["pass"] == "forward"]
    last, first = float(frame["order"].max()), -10.0
    ends = [
        ("embed_tokens", first),
        ("rotary_emb", first + 1),
        ("norm", last),
        ("lm_head", last + 1),
    ]
    single = [forward.iloc[0].to_dict() | {"name": f"model.{n}", "order": o} for n, o in ends]
    frame = pd.concat([frame, pd.DataFrame(single)])
    figure = plotting.plot_dtype_flow(frame, title="A finding " * 12)
    FigureCanvasAgg(figure).draw()
    # Matplotlib's own, of labels without room: not those of packages that it calls.
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []
    bottom = figure.axes[-1]
    boxes = [label.get_window_extent() for label in bottom.get_xticklabels()]
    assert all(a.x1 <= b.x0 for a, b in itertools.pairwise(boxes))
    footer = figure._supxlabel.get_window_extent()
    assert footer.y0 >= 0
    assert min(box.y0 for box in boxes) >= footer.y1
    heights = [axes.get_window_extent().height / figure.dpi for axes in figure.axes]
    assert heights[0] > 1.0  # inches
    assert all(height > 2.5 for height in heights[1:])
    assert bottom.get_window_extent().width / figure.dpi > 2


def test_many_layers_are_labelled_by_layer_and_few_by_module():
    few = plotting.plot_dtype_flow(make_flow(), title="A finding").axes[1]
    assert few.get_xticklabels()[0].get_text() == "model.layers.0.norm"
    for layers in (20, 48):
        many = plotting.plot_dtype_flow(make_flow(layers=layers), title="A finding").axes[1]
        labels = [label.get_text() for label in many.get_xticklabels()]
        assert labels == [f"layers.{i}" for i in range(layers)]


def test_a_frame_that_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="lacks dtype_out"):
        plotting.plot_dtype_flow(make_flow().drop(columns="dtype_out"), title="x")
    with pytest.raises(ValueError, match="no forward call"):
        plotting.plot_dtype_flow(make_flow().iloc[:0], title="x")
