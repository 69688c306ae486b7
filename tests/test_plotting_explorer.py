"""Pictures of tiles: of a score matrix, and of what block sizes need and move."""

import itertools

import pytest
import torch

from labsupport import plotting
from labsupport.analysis.explorer import (
    kernel_walk_slider,
    tile_choices,
    tile_pass,
    tile_pass_slider,
)

KIB = 1024


@pytest.fixture(scope="module")
def table():
    return tile_choices(1024, 64, fast_bytes=99 * KIB)


def test_the_picture_of_tiles_counts_what_the_causal_mask_leaves():
    for sizes, causal, counts in (
        ((4, 4, 1, 1), True, "10 tiles computed, 0 tiles computed, with a mask, 6 tiles skipped"),
        ((4, 6, 2, 4), False, "4 tiles computed, 0 tiles computed, with a mask, 0 tiles skipped"),
        # Rows 0, 1 see keys up to 1, 2; rows 2, 3 up to 3, 4; row 4 up to 5.
        ((5, 6, 2, 3), True, "3 tiles computed, 2 tiles computed, with a mask, 1 tiles skipped"),
    ):
        names = ("seqlen_q", "seqlen_k", "block_q", "block_k")
        figure = plotting.plot_tiles(**dict(zip(names, sizes, strict=True)), causal=causal)
        assert counts in figure.description


def test_the_chosen_pair_is_marked_and_only_cells_that_do_not_fit_are_hatched(table):
    figure = plotting.plot_tile_choices(table, chosen=(128, 32))
    axes = figure.axes[0]
    [mark] = [patch for patch in axes.patches if patch.get_gid() == "chosen"]
    assert (mark.get_x() + 0.5, mark.get_y() + 0.5) == (1, 3)
    [hatched] = [c for c in axes.collections if c.get_hatch()]
    lost = (~table["fits"]).sum()
    assert len(hatched.get_paths()) == lost
    assert len(axes.texts) == table["fits"].sum()
    assert "hatched: does not fit" in axes.get_title(loc="left")
    words = plotting.alt_text(figure)
    assert f"compulsory least. Left: a map of 49 pairs of block sizes; {lost} of them do" in words
    assert "The textbook: " in words
    assert "M = 99 KiB" in words


def test_the_curve_never_rises_and_lies_above_both_limits(table):
    figure = plotting.plot_tile_choices(table)
    lines = {line.get_label().split(":")[0]: line for line in figure.axes[1].get_lines()}
    memory, least = lines["the best pair that fits"].get_data()
    assert all(a >= b for a, b in itertools.pairwise(least))
    (first, last) = (x * y for x, y in zip(*lines["theorem 2"].get_data(), strict=True))
    assert first == pytest.approx(last)
    assert all(y * x >= first for x, y in zip(memory, least, strict=True))
    assert min(least) >= lines["compulsory"].get_ydata()[0]


def test_pairs_that_do_not_fit_make_the_headline_and_stay_inside_of_the_picture(table):
    figure = plotting.plot_tile_choices(table, chosen=(1024, 1024))
    assert "does not fit: it needs" in figure.get_suptitle()
    assert figure.axes[1].get_legend().get_texts()[-1].get_text() == "too large: 1024 × 1024"
    none_fits = tile_choices(512, 256, fast_bytes=48 * KIB, dtype="float32")
    figure = plotting.plot_tile_choices(none_fits)
    low, high = figure.axes[1].get_xlim()
    assert low < 48 < high
    assert figure._repr_mimebundle_()["image/png"]


def test_the_frames_of_a_pass_end_with_the_softmax_and_show_each_rescaling():
    # Each row rises, so that each tile rescales.
    scores = torch.arange(24.0, dtype=torch.float64).view(3, 8) / 4
    v = torch.randn(8, 2, dtype=torch.float64)
    steps = tile_pass(scores, v, block_k=3)
    last = steps[-1]
    torch.testing.assert_close(last["o"] / last["l"][:, None], scores.softmax(-1) @ v)
    torch.testing.assert_close(last["m"] + last["l"].log(), scores.logsumexp(-1))
    assert [(step["start"], step["stop"]) for step in steps] == [(0, 3), (3, 6), (6, 8)]
    shown = {text.get_text() for axes in plotting.plot_tile_pass(steps).axes for text in axes.texts}
    shrunk = [f for step in steps[1:] for f in step["factor"].tolist() if f != 1]
    assert shrunk
    assert {f"× {factor:.3f}" for factor in shrunk} <= shown


def test_the_slider_of_a_pass_shows_the_frame_of_its_tile():
    slider, picture = tile_pass_slider(tile_pass(torch.eye(4), torch.eye(4), block_k=2)).children
    first = picture.value
    slider.value = 2
    assert "After tile 2 of 2" in picture.value != first


def test_the_walk_of_a_kernel_visits_the_tiles_that_a_causal_mask_leaves():
    whole = plotting.plot_kernel_walk(10, block=4)
    assert whole.description.startswith("3 programs compute 6 of 9 tiles: program 0 the keys")
    assert "program 2 the keys from 8" in whole.description
    assert [panel.get_title(loc="left").splitlines()[1] for panel in whole.axes] == [
        "scores masked, then it stores",
        "scores unmasked, then the next tile",
        "scores masked, then it stores",
        "scores unmasked, then the next tile",
        "scores unmasked, then the next tile",
        "scores masked, then it stores",
    ]
    one = plotting.plot_kernel_walk(10, block=4, step=3)
    assert one.get_suptitle() == "Step 4 of 6: program 2, keys from 0"
    with pytest.raises(ValueError, match="there are 6"):
        plotting.plot_kernel_walk(10, block=4, step=6)
    assert "2 programs compute 4 of 4" in plotting.plot_kernel_walk(8, causal=False).description


def test_the_walks_slider_has_a_frame_for_each_step():
    slider, picture = kernel_walk_slider(4, block=2).children
    first = picture.value
    slider.value = slider.max
    assert slider.max == 3
    assert picture.value != first
    assert "Step 3 of 3" in picture.value
