"""The table of tiles, checked against a counting memory; and the explorer, its controls set."""

import base64
import importlib.util
import math
import re
import struct

import pytest
import torch

from labsupport.analysis import tile_choices, tile_explorer
from labsupport.analysis.tiles import best_choice, block_sizes, describe_choice, fast_memories
from labsupport.analysis.traffic.count import count

KIB = 1024


@pytest.fixture(scope="module")
def h200():
    return tile_choices(4096, 64, fast_bytes=227 * KIB)


@pytest.mark.parametrize("order", ["version1", "version2"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_table_says_what_a_running_algorithm_needs_and_moves(order, causal):
    table = tile_choices(
        64, 8, fast_bytes=1 << 20, dtype="float64", causal=causal, order=order
    ).set_index(["block_q", "block_k"])
    q, k, v = torch.randn(3, 64, 8, dtype=torch.float64, generator=torch.manual_seed(0))
    for blocks in ((16, 32), (32, 16), (64, 64)):
        run = count(order, q, k, v, block_q=blocks[0], block_k=blocks[1], causal=causal)
        row = table.loc[blocks]
        assert row["traffic_bytes"] == 8 * run.total
        assert row["read_bytes"] == 8 * sum(run.read.values())
        assert row["needed_bytes"] == 8 * run.peak


def test_there_is_a_row_for_each_pair_and_it_fits_if_the_memory_holds_what_it_needs(h200):
    assert block_sizes(4096) == [16, 32, 64, 128, 256, 512, 1024]
    assert block_sizes(96) == [16, 32]
    pairs = list(zip(h200["block_q"], h200["block_k"], strict=True))
    assert pairs == [(r, c) for r in block_sizes(4096) for c in block_sizes(4096)]
    assert 0 < h200["fits"].sum() < len(h200)
    assert (h200["fits"] == (h200["needed_bytes"] <= 227 * KIB)).all()
    needed = int(h200["needed_bytes"].iloc[10])
    assert tile_choices(4096, 64, fast_bytes=needed)["fits"].iloc[10]
    assert not tile_choices(4096, 64, fast_bytes=needed - 2)["fits"].iloc[10]


@pytest.mark.parametrize(
    ("order", "seqlen", "causal"), [("version1", 512, True), ("version2", 4096, False)]
)
def test_nothing_moves_less_than_theory_allows(order, seqlen, causal):
    table = tile_choices(seqlen, 64, fast_bytes=227 * KIB, order=order, causal=causal)
    assert (table["times_compulsory"] >= 1).all()
    assert (table["traffic_bytes"] >= table["theorem_bytes"]).all()
    if order == "version2":  # one tile of everything
        assert tile_choices(256, 32, fast_bytes=1 << 20)["times_compulsory"].iloc[-1] == 1


def test_larger_numbers_need_more_and_a_mask_moves_less():
    plain = tile_choices(1024, 64, fast_bytes=99 * KIB)
    single = tile_choices(1024, 64, fast_bytes=99 * KIB, dtype="float32")
    masked = tile_choices(1024, 64, fast_bytes=99 * KIB, causal=True)
    assert (single["needed_bytes"] == 2 * plain["needed_bytes"]).all()
    assert (masked["traffic_bytes"] <= plain["traffic_bytes"]).all()
    assert (masked["traffic_bytes"] < plain["traffic_bytes"]).any()


def test_the_block_that_stays_decides_the_traffic(h200):
    assert (h200.groupby("block_q")["traffic_bytes"].nunique() == 1).all()
    best_q, best_k = best_choice(h200)
    assert best_q > best_k
    keys = tile_choices(4096, 64, fast_bytes=227 * KIB, order="version1")
    best_q, best_k = best_choice(keys)
    assert best_k > best_q


def test_the_sentence_says_what_the_row_says(h200):
    row = h200.set_index(["block_q", "block_k"]).loc[(128, 64)]
    kib, mib = row["needed_bytes"] / KIB, row["traffic_bytes"] / 2**20
    sentence = describe_choice(h200, 128, 64)
    assert sentence.startswith(
        f"Br = 128, Bc = 64: needs {kib:.0f} KiB of 227, moves {mib:.1f} MiB"
    )
    assert f"{1 / row['times_textbook']:.1f} times less than the textbook" in sentence
    assert "more than the textbook" in describe_choice(h200, 16, 16)
    outside = describe_choice(h200, 1024, 1024)
    assert "does not fit" in outside
    assert "Br = 512, Bc = 16 moves least" in outside


def test_where_nothing_fits_the_sentence_says_so():
    table = tile_choices(512, 256, fast_bytes=48 * KIB, dtype="float32")
    assert best_choice(table) is None
    assert "No pair fits" in describe_choice(table, 16, 16)
    tiny = tile_choices(512, 256, fast_bytes=KIB)
    assert math.isnan(tiny.attrs["case"]["textbook_bytes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seqlen": 100}, "multiple of 16"),
        ({"head_dim": 0}, "head_dim"),
        ({"fast_bytes": 0}, "fast_bytes"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; known: float64"),
        ({"order": "version3"}, "unknown order 'version3'; known: version2, version1"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tile_choices(**{"seqlen": 64, "head_dim": 8, "fast_bytes": KIB} | arguments)


def test_the_sizes_of_fast_memory_come_from_the_table_of_gpus():
    labels = {size // KIB: label for label, size in fast_memories()}
    assert {48, 99, 163, 227} <= set(labels)
    for kib, name in ((227, "H200"), (163, "A100"), (99, "RTX 4090")):
        assert labels[kib].count(name) == 1


class Hand:
    """Sets the explorer's controls by their descriptions, and reads what it shows."""

    def __init__(self, box):
        controls, self._sentence, self._picture, self.note = box.children
        self.controls = {control.description: control for control in controls.children}

    def set(self, description, value):
        self.controls[description].value = value

    @property
    def sentence(self):
        return re.sub(r"<[^>]+>", "", self._sentence.value)

    @property
    def picture(self):
        return base64.b64decode(re.search(r"base64,([^']+)'", self._picture.value).group(1))

    @property
    def words(self):
        return re.search(r"alt='([^']+)'", self._picture.value).group(1)


@pytest.fixture
def hand():
    pytest.importorskip("ipywidgets")
    return Hand(tile_explorer(seqlen=1024, head_dim=64))


def test_the_explorer_begins_with_a_sentence_a_picture_and_what_m_is(hand):
    assert hand.sentence.startswith("Br = 128, Bc = 64: needs ")
    assert hand.picture.startswith(b"\x89PNG")
    assert min(struct.unpack(">II", hand.picture[16:24])) > 400
    assert "registers" in hand.note.value
    assert all(control.description and control.tooltip for control in hand.controls.values())
    assert "times the compulsory least" in hand.words


@pytest.mark.parametrize(
    ("description", "value"),
    [
        ("N (tokens)", 2048),
        ("d", 128),
        ("fast memory M", 48 * KIB),
        ("dtype", "float32"),
        ("outer loop", "version1"),
        ("causal mask", True),
        ("Br", 32),
    ],
)
def test_every_control_changes_what_is_shown(hand, description, value):
    sentence, picture = hand.sentence, hand.picture
    hand.set(description, value)
    assert hand.sentence != sentence
    assert hand.picture != picture


def test_the_sentence_is_the_tables(hand):
    hand.set("fast memory M", 99 * KIB)
    hand.set("causal mask", True)
    hand.set("Bc", 32)
    table = tile_choices(1024, 64, fast_bytes=99 * KIB, causal=True)
    assert hand.sentence == describe_choice(table, 128, 32)


def test_blocks_larger_than_the_length_are_not_offered_and_those_beyond_the_memory_named(hand):
    hand.set("Br", 1024)
    hand.set("Bc", 1024)
    assert "does not fit" in hand.sentence
    assert "does not fit" in hand.words
    hand.set("N (tokens)", 512)
    assert hand.controls["Br"].value == max(hand.controls["Bc"].options) == 512
    assert "Br = 512" in hand.sentence
    hand.set("Br", 64)
    hand.set("Bc", 16)
    assert "does not fit:" not in hand.sentence


def test_without_ipywidgets_the_error_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else found(name)
    )
    with pytest.raises(ImportError, match="pip install ipywidgets"):
        tile_explorer()
