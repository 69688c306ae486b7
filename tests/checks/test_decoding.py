import pytest
import torch

from labsupport import checks
from tests.checks.solutions import broken, function, solution_source

ALL = [
    checks.check_visible_positions,
    checks.check_visible_padding,
    checks.check_visible_decoding,
]


def source():
    return solution_source("02", "ex-2-3-decoding-mask")


def diagnosis(student, *some):
    with pytest.raises(checks.CheckFailed) as caught:
        for check in some or ALL:
            check(student)
    return str(caught.value)


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("seed", [0, 5, 8])
def test_the_solution_passes(check, seed, capsys):
    check(function(source(), "visible"), seed=seed)
    assert capsys.readouterr().out.startswith("[ok]")


def test_another_right_way_passes():
    def by_positions(seqlen_q, seqlen_k, valid=None):
        keys = torch.arange(seqlen_k)
        queries = torch.arange(seqlen_k - seqlen_q, seqlen_k)
        mask = keys[None, :] <= queries[:, None]
        if valid is None:
            return mask
        return torch.logical_and(mask.view(1, 1, *mask.shape), valid.unsqueeze(1).unsqueeze(1))

    for check in ALL:
        check(by_positions)


DIAGONAL, PADDING = "diagonal=seqlen_k - seqlen_q", "causal & valid[:, None, None, :]"
NAMED = ("return", f"m = None if valid is None else {PADDING}\n    return")
MISTAKES = {
    "top-left": ([(DIAGONAL, "")], "starts at the top left"),
    "strict": ([(DIAGONAL, DIAGONAL + " - 1")], "does not see itself"),
    "one too many": ([(DIAGONAL, DIAGONAL + " + 1")], "one token of its future"),
    "inverted": ([(DIAGONAL + ")", DIAGONAL + ").logical_not()")], "It is inverted"),
    "upper triangle": ([("tril", "triu")], "triangle is inverted"),
    "nothing hidden in a chunk": (
        [(DIAGONAL, "diagonal=0 if seqlen_q == seqlen_k else seqlen_k")],
        "right for one new token",
    ),
    "numbers": ([(DIAGONAL + ")", DIAGONAL + ").float()")], "adding 1 hides nothing"),
    "-inf and 0": (
        [(DIAGONAL + ")", DIAGONAL + ").float().log()")],
        "return booleans",
    ),
    "padding ignored": ([(PADDING, "causal")], "Is `valid` ignored?"),
    "padding ignored in the right shape": (
        [(PADDING, "causal.expand(len(valid), 1, -1, -1)")],
        "`valid` is ignored",
    ),
    "padding of queries": (
        [(PADDING, "causal & valid[:, None, -seqlen_q:, None]")],
        "hides queries, not keys",
    ),
    "padding of both": (
        [(PADDING, "causal & valid[:, None, None, :] & valid[:, None, -seqlen_q:, None]")],
        "queries as well as keys",
    ),
    "True for padding": ([(PADDING, "causal & ~valid[:, None, None, :]")], "`valid` is True for text"),
    "or": ([(PADDING, "causal | valid[:, None, None, :]")], "must be both"),
    "no dimension for heads": ([(PADDING, "causal & valid[:, None, :]")], "stands for the heads"),
    "empty rows filled": (
        [(f"else {PADDING}", "else m | ~m.any(-1, keepdim=True)"), NAMED],
        "Leave them False",
    ),
    "padding sees itself": (
        [(f"else {PADDING}", "else m | (~m.any(-1, keepdim=True) & causal & ~ones.tril(seqlen_k - seqlen_q - 1))"), NAMED],
        "the query sees itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), MISTAKES.values(), ids=MISTAKES)
def test_each_mistake_gets_its_own_diagnosis(changes, said):
    assert said in diagnosis(broken(source(), "visible", *changes))


def test_a_mistake_without_a_name_is_located():
    student = broken(source(), "visible", (DIAGONAL + ")", DIAGONAL + ").roll(1, 0)"))
    assert "is at position" in diagnosis(student)


DECODING = {
    "top-left": ([(DIAGONAL, "")], "gets other outputs than alone"),
    "padding ignored": ([(PADDING, "causal")], "3 tokens of padding"),
    "chunk sees its future": ([(DIAGONAL, "diagonal=seqlen_k")], "step 0 to 3 (prefill"),
    "a shape that does not fit": (
        [(PADDING, "(causal & valid[:, None, None, :])[:, :, :, :-1]")],
        "refuses your mask",
    ),
    "numbers": ([(PADDING, "(causal & valid[:, None, None, :]).float()")], "boolean tensor"),
}


@pytest.mark.parametrize(("changes", "said"), DECODING.values(), ids=DECODING)
def test_a_wrong_mask_shows_in_a_decoded_batch(changes, said):
    student = broken(source(), "visible", *changes)
    assert said in diagnosis(student, checks.check_visible_decoding)


def test_rows_without_keys_may_hold_anything_in_a_decoded_batch():
    # What padding computes, nobody reads: the third check judges outputs of real tokens only.
    def filled(seqlen_q, seqlen_k, valid=None):
        mask = function(source(), "visible")(seqlen_q, seqlen_k, valid)
        return mask | ~mask.any(-1, keepdim=True)

    checks.check_visible_decoding(filled)


def test_a_stub_is_called_one():
    def visible(seqlen_q, seqlen_k, valid=None):
        raise NotImplementedError

    assert "not written yet" in diagnosis(visible)
