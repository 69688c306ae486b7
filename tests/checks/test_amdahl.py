import math

import pytest

from labsupport import checks
from tests.checks.solutions import broken, diagnosis, function, solution_source


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


SPEEDUPS = {
    "product": (lambda p, s: p * s, "share * speedup"),
    "time, not speed": (lambda p, s: 1 - p + p / s, "is its inverse"),
    "mean of speeds": (lambda p, s: 1 - p + p * s, "speeds do not"),
    "untouched part forgotten": (lambda p, s: s / p if p else math.inf, "1 - share, as before"),
    "limit": (lambda p, s: 1 / (1 - p) if p < 1 else math.inf, "infinite speed-up"),
    "untouched part whole": (lambda p, s: 1 / (1 + p / s), "not all of it"),
    "swapped": (lambda p, s: 1 / (p + (1 - p) / s), "swapped"),
    "percent": (lambda p, s: 100 / (1 - p + p / s), "percent"),
    "text": (lambda p, s: "twice", "not str"),
    "something else": (lambda p, s: 2 + p, "is right"),
}


@pytest.mark.parametrize(("student", "said"), SPEEDUPS.values(), ids=SPEEDUPS)
def test_each_wrong_speedup_gets_its_own_diagnosis(student, said):
    assert said in diagnosis(checks.check_amdahl, student)


SHARES = {
    "causal ignored": ([("(2 if causal else 1)", "1")], "hides half"),
    "always halved": ([("(2 if causal else 1)", "2")], "only with causal=True"),
    "grouped heads compute less": ([("layers * heads * 4", "layers * kv_heads * 4")], "every query head"),
    "k and v as wide as q": ([("2 * kv_heads", "2 * heads")], "projected to kv_heads"),
    "two MLP matrices": ([("3 * hidden", "2 * hidden")], "three matrices"),
    "no output layer": ([(" + hidden * vocab", "")], "lm_head"),
    "output layer in every layer": (
        [("layers * (projections + mlp) + hidden * vocab", "layers * (projections + mlp + hidden * vocab)")],
        "not in every layer",
    ),
    "one product": ([("heads * 4 *", "heads * 2 *")], "two products"),
    "multiply-add once": ([("2 * seqlen * (layers", "seqlen * (layers")], "counts as 2"),
    "no output projection": ([("(2 * heads + 2", "(heads + 2")], "output (o,"),
    "no projections": ([("(projections + mlp)", "mlp")], "q, k, v and o are missing"),
    "no projections of q, k, v": (
        [("(2 * heads + 2 * kv_heads)", "heads")],
        "q, k and v are missing",
    ),
    "one projection for k and v": ([("+ 2 * kv_heads", "+ kv_heads")], "a projection each"),
    "q and o square": (
        [("hidden * (2 * heads + 2 * kv_heads) * head_dim", "2 * hidden * (hidden + kv_heads * head_dim)")],
        "not hidden x hidden",
    ),
    "relative to the rest": ([("/ (attention_flops + rest)", "/ rest")], "relative to the rest"),
    "the rest": ([("return attention_flops /", "return rest /")], "1 minus that"),
    "percent": ([("return attention", "return 100 * attention")], "percent"),
    "linear": ([("seqlen**2", "seqlen")], "square of seqlen"),
    "one layer of attention": ([("layers * heads", "heads")], "Count attention in every"),
    "one layer of the rest": ([("layers * (projections", "(projections")], "MLP in every"),
    "one head": ([("layers * heads * 4", "layers * 4")], "multiply by heads"),
    "projections counted as attention": (
        [("    return attention_flops /", "    own = 2 * seqlen * layers * projections\n    return (attention_flops + own) /")],
        "belong to the rest",
    ),
    "causal not the default": ([("causal=True", "causal=False")], "causal not given"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), SHARES.values(), ids=SHARES)
def test_each_wrong_count_gets_its_own_diagnosis(changes, said):
    student = broken(source(), "attention_flop_share", *changes)
    assert said in diagnosis(checks.check_attention_share, student)


def test_stubs_are_called_stubs():
    def amdahl(share, speedup):
        raise NotImplementedError

    assert "not written yet" in diagnosis(checks.check_amdahl, amdahl)
