import pytest
import torch

from labsupport import checks
from labsupport.checks import decoding
from labsupport.checks.verdict import Mistake
from tests.checks.solutions import diagnosis, each, function, solution_source

ALL = [checks.check_visible_positions, checks.check_visible_padding, checks.check_visible_decoding]


def source():
    return solution_source("02", "ex-2-3-decoding-mask")


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


OTHERS = (
    Mistake(("return mask", "return mask.float()"), "adding 1 hides nothing"),
    Mistake(("return mask", "return mask.float().log()"), "return booleans"),
    Mistake(("None, None, :]", "None, :]"), "stands for the heads"),
    Mistake(("valid is not None", "False"), "Is `valid` ignored?"),
    Mistake(("return mask", "return mask.roll(1, -2)"), "is at position"),
)


@each((ALL, decoding.visible, decoding.MISTAKES + OTHERS))
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


DECODING = (
    Mistake(("tril(seqlen_k - seqlen_q)", "tril()"), "gets other outputs than alone"),
    Mistake(("valid is not None", "False"), "3 tokens of padding"),
    Mistake(("- seqlen_q", ""), "step 0 to 3 (prefill"),
    Mistake(("return mask", "return mask[..., :-1]"), "refuses your mask"),
    Mistake(("return mask", "return mask.float()"), "boolean tensor"),
)


@each((checks.check_visible_decoding, decoding.visible, DECODING))
def test_a_wrong_mask_shows_in_a_decoded_batch(check, student, said):
    assert said in diagnosis(check, student)


def test_rows_without_keys_may_hold_anything_in_a_decoded_batch():
    # What padding computes, nobody reads: the third check judges outputs of real tokens only.
    def filled(seqlen_q, seqlen_k, valid=None):
        mask = function(source(), "visible")(seqlen_q, seqlen_k, valid)
        return mask | ~mask.any(-1, keepdim=True)

    checks.check_visible_decoding(filled)


def test_a_stub_is_called_one():
    def visible(seqlen_q, seqlen_k, valid=None):
        raise NotImplementedError

    assert "not written yet" in diagnosis(ALL, visible)
