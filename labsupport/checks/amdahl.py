"""Exercise 2-4: how much faster a model gets when only its attention does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from labsupport.checks.counting_numbers import compare
from labsupport.checks.verdict import CheckFailed, Mistake, call, explain, passed

LLAMA_1B = {
    "hidden": 2048,
    "layers": 16,
    "intermediate": 8192,
    "vocab": 128_256,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 64,
}
SMOLLM2 = {
    "hidden": 576,
    "layers": 30,
    "intermediate": 1536,
    "vocab": 49_152,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 64,
}


def overall_speedup(share: float, speedup: float) -> float:
    """Return how many times as fast the whole becomes, by Amdahl's law.

    Args:
        share: the fraction of the time, 0 to 1, that the faster part took.
        speedup: how many times as fast that part becomes.

    Source: G. Amdahl, "Validity of the single processor approach" (AFIPS 1967).
    """
    return 1 / (1 - share + share / speedup)


def flop_share(
    seqlen: int,
    hidden: int,
    layers: int,
    intermediate: int,
    vocab: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    causal: bool = True,
) -> float:
    """Return attention's share of the FLOPs of a Llama over `seqlen` tokens, all logits counted.

    Args:
        seqlen: tokens of the prefill.
        hidden, layers, intermediate, vocab, heads, kv_heads, head_dim: see `LLAMA_1B`.
        causal: whether half of the pairs are hidden.
    """
    projections = hidden * (2 * heads + 2 * kv_heads) * head_dim
    mlp = 3 * hidden * intermediate
    rest = 2 * seqlen * (layers * (projections + mlp) + hidden * vocab)
    attention = layers * heads * 4 * seqlen**2 * head_dim / (2 if causal else 1)
    return attention / (attention + rest)


_SPEEDUP = "1 / (1 - share + share / speedup)"
SPEEDUP_MISTAKES = (
    Mistake((_SPEEDUP, "share * speedup"), "That is share * speedup. Add up times, not speed-ups."),
    Mistake(
        ("return 1 /", "return"),
        "That is the time that is left, relative to before; the speed-up is its inverse.",
    ),
    Mistake(
        (_SPEEDUP, "1 - share + share * speedup"),
        "That is the mean of the two speeds. Add up times, relative to the old one, and invert.",
    ),
    Mistake(
        ("1 - share + ", ""),
        "The part that attention does not touch is missing: it takes 1 - share, as before.",
    ),
    Mistake(
        ("+ share / speedup", ""),
        "That is the limit for an infinite speed-up; attention still takes share / speedup.",
    ),
    Mistake(("1 - share +", "1 +"), "The untouched part is 1 - share of the time, not all of it."),
    Mistake(
        (_SPEEDUP, "1 / (share + (1 - share) / speedup)"),
        "The two parts are swapped: share is what gets faster.",
    ),
    Mistake(("return 1 /", "return 100 /"), "That is in percent; return a factor."),
)
SHARE_MISTAKES = (
    Mistake(
        ("layers * heads", "layers * kv_heads"),
        "Every query head computes scores of its own: count heads, not kv_heads, in attention.",
    ),
    Mistake(
        ("2 * kv_heads", "2 * heads"),
        "K and V are projected to kv_heads * head_dim columns, not to heads * head_dim.",
    ),
    Mistake(
        ("(2 if causal else 1)", "1"),
        "The causal mask hides half of the pairs: half of attention's FLOPs are left.",
    ),
    Mistake(("(2 if causal else 1)", "2"), "Half of attention's FLOPs only with causal=True."),
    Mistake(("3 * hidden", "2 * hidden"), "A gated MLP has three matrices: gate, up and down."),
    Mistake(("+ hidden * vocab", ""), "The output layer (lm_head, hidden x vocab) is missing."),
    Mistake(
        ("+ hidden * vocab", "+ layers * hidden * vocab"),
        "The output layer comes once, not in every layer.",
    ),
    Mistake(
        ("heads * 4", "heads * 2"),
        "Attention is two products, Q K^T and P V: 4 * seqlen^2 * head_dim a head.",
    ),
    Mistake(
        ("2 * seqlen * (", "seqlen * ("),
        "A multiply-add counts as 2 FLOPs in the matrices as well as in attention.",
    ),
    Mistake(
        ("(2 * heads +", "(heads +"),
        "The projection of the output (o, heads * head_dim to hidden) is missing.",
    ),
    Mistake(("(2 * heads + 2 * kv_heads)", "heads"), "The projections of q, k and v are missing."),
    Mistake(("(projections + mlp)", "mlp"), "The projections of q, k, v and o are missing."),
    Mistake(("+ 2 * kv_heads", "+ kv_heads"), "K and V have a projection each."),
    Mistake(
        ("(2 * heads + 2 * kv_heads) * head_dim", "2 * (hidden + kv_heads * head_dim)"),
        "q and o are hidden x (heads * head_dim), which is not hidden x hidden in every model.",
    ),
    Mistake(
        ("(attention + rest)", "rest"),
        "That is attention relative to the rest; return its share of the whole.",
    ),
    Mistake(
        ("return attention", "return rest"),
        "That is the share of the rest; attention's is 1 minus that.",
    ),
    Mistake(
        ("return attention", "return (attention + 2 * seqlen * layers * projections)"),
        "The projections belong to the rest here: attention is Q K^T and P V.",
    ),
    Mistake(
        ("return attention", "return 100 * attention"),
        "That is in percent; return a fraction from 0 to 1.",
    ),
    Mistake(("seqlen**2", "seqlen"), "Attention grows with the square of seqlen."),
    Mistake(("layers * heads", "heads"), "Count attention in every layer."),
    Mistake(
        ("layers * (projections", "(projections"),
        "Count the projections and the MLP in every layer.",
    ),
    Mistake(("layers * heads", "layers"), "Every head has its scores: multiply by heads."),
)


def check_amdahl(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-4: the overall speed-up, if a share of the time is sped up."""
    draw = random.Random(seed)
    cases = [(0.5, 2.0), (0.3, 10.0), (0.9, 100.0), (0.4, 0.5)]
    cases += [(draw.uniform(0.1, 0.9), draw.uniform(1.5, 20)) for _ in range(3)]
    cases += [(0.0, 5.0), (1.0, 5.0), (0.75, math.inf)]
    for share, speedup in cases:
        given = call(student, share, speedup)
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise CheckFailed(f"return a number, not {type(given).__name__}.")
        right = overall_speedup(share, speedup)
        if math.isclose(given, right):
            continue
        said = explain(
            given,
            overall_speedup,
            SPEEDUP_MISTAKES,
            lambda f, case=(share, speedup): f(*case),
            math.isclose,
        )
        raise CheckFailed(
            f"for share {share:.3g} and speedup {speedup:.3g} you return {given:.4g}. "
            f"{said or f'{right:.4g} is right.'}"
        )
    passed("the new time is the untouched part and the faster part", seed)


def check_attention_share(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-4: the share of attention in the FLOPs of a Llama's prefill."""
    draw = random.Random(seed)
    # SmolLM2 is not the first: its projections take exactly as many FLOPs as one matrix of its MLP.
    shapes = [LLAMA_1B, SMOLLM2, dict(SMOLLM2, kv_heads=9), dict(SMOLLM2, heads=8, kv_heads=2)]
    for _ in range(2):
        kv_heads, group = draw.randint(1, 8), draw.randint(1, 8)
        shapes.append(
            {
                "hidden": draw.randrange(256, 4096, 64),
                "layers": draw.randint(2, 80),
                "intermediate": draw.randrange(512, 8192, 64),
                "vocab": draw.randrange(1000, 128_000),
                "heads": kv_heads * group,
                "kv_heads": kv_heads,
                "head_dim": draw.choice([64, 96, 128]),
            }
        )
    for shape in shapes:
        for seqlen in (512, 8192, 100_000):
            _judge_share(student, {"seqlen": seqlen, **shape}, {"causal": False}, {"causal": True})
        _judge_share(student, {"seqlen": 4096, **shape}, {}, where="(causal not given: True) ")
    passed("attention's share of the FLOPs, by the counting rules", seed)


def _judge_share(
    student: Callable[..., Any], shape: dict[str, Any], *options: dict[str, Any], where: str = ""
) -> None:
    """Judge what is returned with each of the options; a mistake must explain all of them."""
    given = [call(student, **shape, **option) for option in options]
    if any(isinstance(g, bool) or not isinstance(g, int | float) for g in given):
        raise CheckFailed("return a number from 0 to 1.")
    wrong = compare(
        [(g,) for g in given],
        flop_share,
        SHARE_MISTAKES,
        lambda f: [(f(**shape, **option),) for option in options],
    )
    if wrong is None:
        return
    i, said = wrong
    case = ", ".join(f"{name} {value:,}" for name, value in shape.items())
    right = flop_share(**shape, **options[i])
    raise CheckFailed(
        f"{where}for {case}, causal={options[i].get('causal', True)} you return {given[i]:.4g}. "
        f"{said or f'{right:.4g} is right.'}"
    )
