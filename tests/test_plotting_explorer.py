import itertools

import pytest

from labsupport import plotting
from labsupport.analysis.explorer import tile_choices

KIB = 1024


@pytest.fixture(scope="module")
def table():
    return tile_choices(1024, 64, fast_bytes=99 * KIB)


def chosen(figure):
    """Column and row of the marked cell."""
    [mark] = [patch for patch in figure.axes[0].patches if patch.get_gid() == "chosen"]
    return mark.get_x() + 0.5, mark.get_y() + 0.5


def curve(figure):
    [line] = [x for x in figure.axes[1].get_lines() if x.get_label() == "the best pair that fits"]
    return line.get_xdata(), line.get_ydata()


def test_the_chosen_pair_is_marked(table):
    assert chosen(plotting.plot_tile_choices(table, chosen=(128, 32))) == (1, 3)


def test_only_cells_that_do_not_fit_are_hatched_and_only_the_others_have_numbers(table):
    axes = plotting.plot_tile_choices(table).axes[0]
    [hatched] = [c for c in axes.collections if c.get_hatch()]
    assert len(hatched.get_paths()) == (~table["fits"]).sum()
    assert len(axes.texts) == table["fits"].sum()
    assert "hatched: does not fit" in axes.get_title(loc="left")


def test_the_curve_never_rises_and_lies_above_both_limits(table):
    figure = plotting.plot_tile_choices(table)
    memory, least = curve(figure)
    assert all(a >= b for a, b in itertools.pairwise(least))
    lines = {line.get_label(): line for line in figure.axes[1].get_lines()}
    [theorem] = [line for label, line in lines.items() if "theorem 2" in label]
    [floor] = [line for label, line in lines.items() if "compulsory" in label]
    constant = theorem.get_xdata()[0] * theorem.get_ydata()[0]
    assert theorem.get_xdata()[1] * theorem.get_ydata()[1] == pytest.approx(constant)
    assert all(y * x >= constant for x, y in zip(memory, least, strict=True))
    assert min(least) >= floor.get_ydata()[0]


def test_a_pair_that_does_not_fit_makes_the_headline(table):
    figure = plotting.plot_tile_choices(table, chosen=(1024, 1024))
    assert "does not fit: it needs" in figure.get_suptitle()
    assert figure.axes[1].get_legend().get_texts()[-1].get_text() == "too large: 1024 × 1024"


def test_a_memory_that_holds_no_pair_can_be_drawn_and_is_inside_of_the_picture():
    figure = plotting.plot_tile_choices(
        tile_choices(512, 256, fast_bytes=48 * KIB, dtype="float32")
    )
    low, high = figure.axes[1].get_xlim()
    assert low < 48 < high
    assert figure._repr_mimebundle_()["image/png"]


def test_the_description_says_what_both_panels_show(table):
    words = plotting.alt_text(plotting.plot_tile_choices(table, title="A finding"))
    assert words.startswith("A finding. Left: a map of 49 pairs of block sizes; ")
    assert f"{(~table['fits']).sum()} of them do not fit" in words
    assert "The textbook: " in words
    assert "M = 99 KiB" in words


def test_what_is_no_table_of_tiles_is_refused(table):
    with pytest.raises(ValueError, match=r"lacks traffic_bytes: pass what tile_choices\(\)"):
        plotting.plot_tile_choices(table.drop(columns="traffic_bytes"))
    bare = table.copy()
    bare.attrs = {}
    with pytest.raises(ValueError, match="lacks its case"):
        plotting.plot_tile_choices(bare)
    with pytest.raises(ValueError, match="no pair Br = 8, Bc = 8"):
        plotting.plot_tile_choices(table, chosen=(8, 8))
