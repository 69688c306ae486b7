"""Calls in a file, where they stand, and what a model or a simple rule says of them."""

import ast
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from labsupport.models import source_text
from labsupport.training.tasks.calls import baselines, call_sites, place
from labsupport.training.tasks.code import predict_calls, score_calls

SOURCE = """\
def alpha(x):
    return x

def beta(y):
    "é"; return alpha(y)

class C:
    def gamma(self):
        return self.gamma(alpha(1)) + len("alpha(2)")

print(beta(3), C().gamma(), alpha)
"""


def test_sites_are_calls_of_functions_and_methods_that_the_file_defines():
    sites = call_sites(SOURCE)
    assert [site.name for site in sites] == ["alpha", "gamma", "alpha", "beta", "gamma"]
    assert all(SOURCE[site.start : site.end] == site.name for site in sites)
    assert all(SOURCE[site.end] == "(" for site in sites)


@pytest.mark.parametrize("module", ["configparser", "textwrap", "statistics", "email.header"])
def test_in_real_files_each_site_is_the_name_in_front_of_an_argument_list(module):
    source = source_text(module)
    sites = call_sites(source)
    assert len(sites) > 5
    for site in sites:
        assert source[site.start : site.end] == site.name
        assert source[site.end :].lstrip()[0] in "()"


def test_a_form_feed_does_not_shift_the_sites():
    source = "def f(): pass\n\x0c\nx = '\x0c\u2028'; f()\n"
    (site,) = call_sites(source)
    assert source[site.start : site.end] == "f"


class Characters:
    """A tokenizer of one token a character, or of pairs."""

    def __init__(self, size=1):
        self.size, self.known = size, {}

    def __call__(self, text, **_):
        spans = [(i, min(i + self.size, len(text))) for i in range(0, len(text), self.size)]
        ids = [self.known.setdefault(text[a:b], len(self.known)) for a, b in spans]
        return {"input_ids": ids, "offset_mapping": spans}

    def decode(self, ids):
        names = {number: text for text, number in self.known.items()}
        return "".join(names[int(i)] for i in ids)


class Knows:
    """A model that knows the file by heart, if `sees(tokens before)` holds, and else says 0."""

    def __init__(self, ids, sees, longest=10**6):
        self.ids, self.sees, self.device = ids, sees, torch.device("cpu")
        self.config = SimpleNamespace(max_position_embeddings=longest)
        self.blocks = []

    def __call__(self, ids, *, use_cache, logits_to_keep):
        block = ids[0].tolist()
        begin = next(i for i in range(len(self.ids)) if self.ids[i : i + len(block)] == block)
        self.blocks.append((begin, len(block)))
        logits = torch.zeros(1, len(logits_to_keep), max(self.ids) + 1)
        for row, at in enumerate(logits_to_keep.tolist()):
            following = begin + at + 1
            right = self.ids[following] if following < len(self.ids) else 0
            logits[0, row, right if self.sees(at + 1) else 0] = 1.0
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [40, 64, 4096])
def test_a_model_that_knows_the_file_is_right_at_each_site_once(size, window):
    source = source_text("textwrap")
    tokenizer = Characters(size)
    ids = tokenizer(source)["input_ids"]
    model = Knows(ids, lambda seen: True)
    table = predict_calls(model, tokenizer, source, window)
    sites = call_sites(source)
    assert list(table.start) == [site.start for site in sites]
    assert list(table.name) == [site.name for site in sites]
    # A token of several characters may hold the name's end and "(" or more: still the file's own.
    assert table.model.all()
    assert (table.seen < window).all()
    later = table.start // size >= window
    assert (table.seen[later] >= window // 2).all()


def test_a_model_that_never_knows_is_never_right():
    tokenizer = Characters()
    model = Knows(tokenizer(SOURCE)["input_ids"], lambda seen: False)
    assert not predict_calls(model, tokenizer, SOURCE, 64).model.any()


def test_a_name_that_goes_on_is_wrong():
    source = "def ab(): pass\ndef abc(): pass\nab()\n"
    tokenizer = Characters()
    ids = tokenizer(source)["input_ids"]
    model = Knows(ids, lambda seen: True)
    assert list(predict_calls(model, tokenizer, source, 64).model) == [True]
    call = source.index("ab()\n")
    prolonged = [*ids]
    prolonged[call + 2] = ids[source.index("abc") + 2]  # "c" is what it would write behind "ab"
    honest = model.__call__

    class Prolongs(Knows):
        def __call__(self, block, **options):
            out = honest(block, **options)
            for row, at in enumerate(options["logits_to_keep"].tolist()):
                if at == call + 1:
                    out.logits[0, row] = 0.0
                    out.logits[0, row, prolonged[call + 2]] = 1.0
            return out

    model = Prolongs(ids, lambda seen: True)
    assert list(predict_calls(model, tokenizer, source, 64).model) == [False]


def test_reachable_is_that_the_name_stands_in_what_the_model_sees():
    source = "def far(): pass\n" + "x = 1\n" * 40 + "far()\nfar()\n"
    tokenizer = Characters()
    model = Knows(tokenizer(source)["input_ids"], lambda seen: True)
    table = predict_calls(model, tokenizer, source, 32)
    first = source.index("far()\n")
    assert list(table.distance) == [first - 4, 6]
    assert list(table.reachable) == [False, True]
    assert list(predict_calls(model, tokenizer, source, 4096).reachable) == [True, True]
    assert list(table.latest) == [False, True]


def test_only_the_sites_asked_for_are_read():
    source = source_text("textwrap")
    tokenizer = Characters()
    model = Knows(tokenizer(source)["input_ids"], lambda seen: True)
    last = call_sites(source)[-1:]
    table = predict_calls(model, tokenizer, source, 64, sites=last)
    assert list(table.start) == [last[0].start]
    assert len(model.blocks) == 1
    assert model.blocks[0][1] < 64 + len(last[0].name)


def test_baselines_look_at_the_visible_calls_only():
    source = "def a(): pass\ndef b(): pass\na()\na()\nx = b()\na()\nx = b()\n"
    sites = call_sites(source)
    last = sites[-1]
    assert [site.name for site in sites] == list("aabab")
    all_seen = baselines(source, last, sites[:-1], 0)
    assert all_seen == {"frequent": False, "latest": False, "search": True}
    one_seen = baselines(source, last, sites[2:3], sites[2].start - 4)
    assert one_seen == {"frequent": True, "latest": True, "search": True}
    assert not any(baselines(source, last, [], last.start).values())


def test_places_are_tokens_that_cover_the_name():
    source = "def fox(): pass\ny = 1;fox()\n"
    spans = [(i, i + 4) for i in range(0, len(source), 4)]
    (placed,) = place(source, spans, call_sites(source))
    covered = source[spans[placed.first][0] : spans[placed.end - 1][1]]
    assert "fox" in covered
    assert len(covered) < 3 + 2 * 4
    assert placed.last == 1  # the token of characters 4 to 7 begins with the name


def test_scores_are_shares_by_window_and_kind_of_site():
    table = pd.DataFrame(
        {
            "window": [8, 8, 8, 8],
            "distance": [0, 3, 3, 90],
            "reachable": [False, True, True, False],
            "model": [False, True, False, False],
            "frequent": [True] * 4,
            "latest": [False] * 4,
            "search": [False] * 4,
        }
    )
    scores = score_calls(table).set_index("sites")
    assert list(scores.index) == ["all", "in the window", "further back", "new"]
    assert list(scores["count"]) == [4, 2, 1, 1]
    assert list(scores["model"]) == [0.25, 0.5, 0.0, 0.0]
    assert list(scores["frequent"]) == [1.0] * 4


def test_an_odd_or_tiny_window_or_one_beyond_the_positions_is_refused():
    tokenizer = Characters()
    model = Knows(tokenizer(SOURCE)["input_ids"], lambda seen: True, longest=20)
    for window in (2, 63):
        with pytest.raises(ValueError, match="must be even, and at least 4"):
            predict_calls(model, tokenizer, SOURCE, window)
    with pytest.raises(ValueError, match="the model 20 positions"):
        predict_calls(model, tokenizer, SOURCE, 64)


def test_the_calls_are_what_ast_counts():
    source = source_text("configparser")
    tree = ast.parse(source)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    called = [
        getattr(node.func, "attr", getattr(node.func, "id", ""))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]
    assert sorted(s.name for s in call_sites(source)) == sorted(n for n in called if n in defined)
