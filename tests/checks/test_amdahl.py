import pytest

from labsupport import checks
from labsupport.checks import amdahl
from labsupport.checks.verdict import Mistake
from tests.checks.solutions import diagnosis, each, function, solution_source


def source():
    return solution_source("02", "ex-2-4-amdahl")


@pytest.mark.parametrize("seed", [0, 5])
def test_the_solutions_pass(seed, capsys):
    checks.check_amdahl(function(source(), "amdahl"), seed=seed)
    checks.check_attention_share(function(source(), "attention_flop_share"), seed=seed)
    assert capsys.readouterr().out.count("[ok]") == 2


def test_another_right_way_passes():
    def share(seqlen, hidden, layers, intermediate, vocab, heads, kv_heads, head_dim, causal=True):
        tokens = 2.0 * seqlen
        layer = tokens * hidden * (heads * head_dim * 2 + kv_heads * head_dim * 2)
        layer += tokens * hidden * intermediate * 3
        scores = seqlen * tokens * head_dim * 2 * heads * (0.5 if causal else 1.0)
        return scores / (scores + layer + tokens * hidden * vocab / layers)

    checks.check_attention_share(share)
    checks.check_amdahl(lambda share, speedup: 1 / (1 - share * (1 - 1 / speedup)))


OTHER_SPEEDUPS = (
    Mistake(("1 / (1 - share + share / speedup)", "'twice'"), "not str"),
    Mistake(("1 / (1 - share + share / speedup)", "2 + share"), "is right"),
)
OTHER_SHARES = (Mistake(("causal: bool = True", "causal: bool = False"), "causal not given"),)


@each(
    (checks.check_amdahl, amdahl.overall_speedup, amdahl.SPEEDUP_MISTAKES + OTHER_SPEEDUPS),
    (checks.check_attention_share, amdahl.flop_share, amdahl.SHARE_MISTAKES + OTHER_SHARES),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


def test_stubs_are_called_stubs():
    def stub(share, speedup):
        raise NotImplementedError

    assert "not written yet" in diagnosis(checks.check_amdahl, stub)
