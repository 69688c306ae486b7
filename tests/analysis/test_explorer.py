"""The table of tiles, checked against a counting memory; and the explorer, its controls set."""

import math
import re

import pytest
import torch

from labsupport.analysis import tile_choices, tile_explorer
from labsupport.analysis.tiles import best_choice, block_sizes, describe_choice, fast_memories
from labsupport.analysis.traffic.count import count

KIB = 1024


@pytest.fixture(scope="module")
def h200():
    return tile_choices(4096, 64, fast_bytes=227 * KIB)


@pytest.mark.parametrize(("order", "causal"), [("version1", True), ("version2", False)])
def test_the_table_says_what_a_running_algorithm_needs_and_moves(order, causal):
    table = tile_choices(32, 8, fast_bytes=1 << 20, dtype="float64", causal=causal, order=order)
    q, k, v = torch.randn(3, 32, 8, dtype=torch.float64, generator=torch.manual_seed(0))
    for blocks in ((16, 32), (32, 16), (32, 32)):
        run = count(order, q, k, v, block_q=blocks[0], block_k=blocks[1], causal=causal)
        row = table.set_index(["block_q", "block_k"]).loc[blocks]
        elements = run.total, sum(run.read.values()), sum(run.written.values()), run.peak
        names = ["traffic_bytes", "read_bytes", "written_bytes", "needed_bytes"]
        assert row[names].tolist() == [8 * each for each in elements]


def test_there_is_a_row_for_each_pair_and_it_fits_if_the_memory_holds_what_it_needs(h200):
    sides = [16, 32, 64, 128, 256, 512, 1024]
    assert block_sizes(96) == [16, 32]
    pairs = list(zip(h200["block_q"], h200["block_k"], strict=True))
    assert pairs == [(r, c) for r in sides for c in sides]
    assert 0 < h200["fits"].sum() < len(h200)
    needed = int(h200["needed_bytes"].iloc[10])
    for memory, fits in ((needed, True), (needed - 2, False)):
        assert tile_choices(4096, 64, fast_bytes=memory)["fits"].iloc[10] == fits


@pytest.mark.parametrize(
    ("order", "seqlen", "causal"), [("version1", 512, True), ("version2", 4096, False)]
)
def test_nothing_moves_less_than_theory_allows_and_the_block_that_stays_decides(
    order, seqlen, causal
):
    table = tile_choices(seqlen, 64, fast_bytes=227 * KIB, order=order, causal=causal)
    assert (table["times_compulsory"] >= 1).all()
    assert (table["traffic_bytes"] >= table["theorem_bytes"]).all()
    best_q, best_k = best_choice(table)
    assert (best_q > best_k) == (order == "version2")
    if order == "version2":
        assert (table.groupby("block_q")["traffic_bytes"].nunique() == 1).all()
        # One tile of everything:
        assert tile_choices(256, 32, fast_bytes=1 << 20)["times_compulsory"].iloc[-1] == 1


def test_the_sentence_says_what_the_row_says(h200):
    row = h200.set_index(["block_q", "block_k"]).loc[(128, 64)]
    kib, mib = row["needed_bytes"] / KIB, row["traffic_bytes"] / 2**20
    sentence = describe_choice(h200, 128, 64)
    start = f"Br = 128, Bc = 64: needs {kib:.0f} KiB of 227, moves {mib:.1f} MiB"
    assert sentence.startswith(start)
    assert f"{1 / row['times_textbook']:.1f} times less than the textbook" in sentence
    assert "more than the textbook" in describe_choice(h200, 16, 16)
    outside = describe_choice(h200, 1024, 1024)
    assert "does not fit" in outside
    assert "Br = 512, Bc = 16 moves least" in outside
    table = tile_choices(512, 256, fast_bytes=48 * KIB, dtype="float32")
    assert best_choice(table) is None
    assert "No pair fits" in describe_choice(table, 16, 16)
    tiny = tile_choices(512, 256, fast_bytes=KIB)
    assert math.isnan(tiny.attrs["case"]["textbook_bytes"])


def test_the_sizes_of_fast_memory_come_from_the_table_of_gpus():
    with pytest.raises(ValueError, match="multiple of 16"):
        tile_choices(100, 8, fast_bytes=KIB)
    labels = {size // KIB: label for label, size in fast_memories()}
    assert {48, 99, 163, 227} <= set(labels)
    for kib, name in ((227, "H200"), (163, "A100"), (99, "RTX 4090")):
        assert labels[kib].count(name) == 1


def test_the_explorer_shows_a_sentence_and_a_picture_that_follow_every_control():
    pytest.importorskip("ipywidgets")
    box, sentence, picture, note = tile_explorer(seqlen=1024, head_dim=64).children
    controls = {control.description: control for control in box.children}
    assert "Br = 128, Bc = 64: needs " in sentence.value
    assert "registers" in note.value
    assert all(control.description and control.tooltip for control in box.children)
    assert "src='data:image/png;base64,iVBOR" in picture.value
    words = re.compile("alt='([^']+)'")
    assert "times the compulsory least" in words.search(picture.value).group(1)
    for description, value in (
        ("causal mask", True),
        ("outer loop", "version1"),
        ("Br", 32),
        ("d", 128),
        ("dtype", "float32"),
        ("fast memory M", 48 * KIB),
        ("Br", 1024),
        ("N (tokens)", 512),
    ):
        before = sentence.value, picture.value
        controls[description].value = value
        assert before[0] != sentence.value, description
        assert before[1] != picture.value, description
    # Blocks larger than the length are not offered; those beyond the memory are named.
    assert controls["Br"].value == max(controls["Bc"].options) == 512
    assert "Br = 512, Bc = 64 does not fit" in sentence.value
    assert "does not fit" in words.search(picture.value).group(1)
