"""Checks of exercise 2-4: how much faster a model gets when only its attention does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from labsupport.checks.verdict import CheckFailed, call, passed

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
    """Amdahl's law: how many times as fast the whole becomes.

    Args:
        share: the fraction of the time, 0 to 1, that the faster part took.
        speedup: how many times as fast that part becomes.

    Source: G. Amdahl, "Validity of the single processor approach" (AFIPS 1967).
    """
    return 1 / (1 - share + share / speedup)


def flop_share(seqlen: int, *, causal: bool = True, **shape: Any) -> float:
    """Attention's share of the FLOPs of a Llama over `seqlen` tokens, all logits counted.

    Args:
        seqlen: tokens of the prefill.
        causal: whether half of the pairs are hidden.
        shape: hidden, layers, intermediate, vocab, heads, kv_heads, head_dim: see `LLAMA_1B`.
    """
    return _share(seqlen, causal, **shape)


def check_amdahl(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-4: the overall speed-up, if a share of the time is sped up.

    Raises:
        CheckFailed: naming the likely mistake.
    """
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
        wrong = _wrong_speedups(share, speedup)
        said = next((text for text in wrong if math.isclose(given, wrong[text])), "")
        raise CheckFailed(
            f"for share {share:.3g} and speedup {speedup:.3g} you return {given:.4g}. "
            f"{said or f'{right:.4g} is right.'}"
        )
    passed("the new time is the untouched part and the faster part", seed)


def _wrong_speedups(share: float, speedup: float) -> dict[str, float]:
    """What each typical mistake returns."""
    time = 1 - share + share / speedup
    untouched_forgotten = speedup / share if share else math.inf
    limit = 1 / (1 - share) if share < 1 else math.inf
    return {
        "That is share * speedup. Add up times, not speed-ups.": share * speedup,
        "That is the time that is left, relative to before; the speed-up is its inverse.": time,
        (
            "That is the mean of the two speeds. Times add up, speeds do not: work out the new "
            "time, relative to the old one, and invert it."
        ): 1 - share + share * speedup,
        "The part that attention does not touch is missing: it takes 1 - share, as before.": (
            untouched_forgotten
        ),
        "That is the limit for an infinite speed-up; attention still takes share / speedup.": limit,
        "The untouched part is 1 - share of the time, not all of it.": 1 / (1 + share / speedup),
        "The two parts are swapped: share is what gets faster.": (
            1 / (share + (1 - share) / speedup)
        ),
        "That is in percent; return a factor.": 100 / time,
    }


def check_attention_share(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 2-4: the share of attention in the FLOPs of a Llama's prefill.

    Raises:
        CheckFailed: naming the likely mistake.
    """
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
            given = {c: call(student, seqlen, **shape, causal=c) for c in (False, True)}
            _judge_share(given, seqlen, shape)
        given = {True: call(student, 4096, **shape)}
        _judge_share(given, 4096, shape, "(causal not given: True) ")
    passed("attention's share of the FLOPs, by the counting rules", seed)


def _judge_share(
    given: dict[bool, Any], seqlen: int, shape: dict[str, Any], where: str = ""
) -> None:
    """Judge what was returned for each value of `causal`; a mistake must explain all of them."""
    wrong = {causal: _wrong_shares(seqlen, causal, shape) for causal in given}
    right = {causal: _share(seqlen, causal, **shape) for causal in given}
    if any(isinstance(g, bool) or not isinstance(g, int | float) for g in given.values()):
        raise CheckFailed("return a number from 0 to 1.")
    off = [causal for causal in given if not math.isclose(given[causal], right[causal])]
    if not off:
        return
    said = f"{right[off[0]]:.4g} is right."
    for diagnosis in wrong[off[0]]:
        if all(math.isclose(given[causal], wrong[causal][diagnosis]) for causal in given):
            said = diagnosis
            break
    sizes = ", ".join(f"{name} {value:,}" for name, value in shape.items())
    raise CheckFailed(
        f"{where}for seqlen {seqlen:,}, {sizes}, causal={off[0]} you return {given[off[0]]:.4g}. "
        f"{said}"
    )


def _wrong_shares(seqlen: int, causal: bool, shape: dict[str, Any]) -> dict[str, float]:
    """What each typical mistake returns."""

    def share(**changes: Any) -> float:
        return _share(seqlen, causal, **{**shape, **changes})

    layers, heads, kv_heads = shape["layers"], shape["heads"], shape["kv_heads"]
    square = shape["hidden"] / (heads * shape["head_dim"])
    in_one_layer = ("q_projection", "kv_projections", "o_projection", "mlp")
    rest = 1 - share()
    wrong = {
        "The causal mask hides half of the pairs: half of attention's FLOPs are left.": share(
            attention=2.0 if causal else 1.0
        ),
        "Half of attention's FLOPs only with causal=True.": share(attention=1.0 if causal else 0.5),
        "A gated MLP has three matrices: gate, up and down.": share(mlp=2 / 3),
        "The output layer (lm_head, hidden x vocab) is missing.": share(lm_head=0.0),
        "The output layer comes once, not in every layer.": share(lm_head=float(layers)),
        "Attention is two products, Q K^T and P V: 4 * seqlen^2 * head_dim a head.": share(
            attention=0.5
        ),
        "A multiply-add counts as 2 FLOPs in the matrices as well as in attention.": share(
            matrices=0.5
        ),
        "The projection of the output (o, heads * head_dim to hidden) is missing.": share(
            o_projection=0.0
        ),
        "The projections of q, k and v are missing.": share(q_projection=0.0, kv_projections=0.0),
        "The projections of q, k, v and o are missing.": share(
            q_projection=0.0, kv_projections=0.0, o_projection=0.0
        ),
        "K and V have a projection each.": share(kv_projections=0.5),
        "q and o are hidden x (heads * head_dim), which is not hidden x hidden in every model.": (
            share(q_projection=square, o_projection=square)
        ),
        "That is attention relative to the rest; return its share of the whole.": share() / rest,
        "That is the share of the rest; attention's is 1 minus that.": rest,
        "The projections belong to the rest here: attention is Q K^T and P V.": share(
            projections_count=True
        ),
        "That is in percent; return a fraction from 0 to 1.": 100 * share(),
        "Attention grows with the square of seqlen.": share(attention=1 / seqlen),
        "Count attention in every layer.": share(attention=1 / layers),
        "Count the projections and the MLP in every layer.": share(
            **dict.fromkeys(in_one_layer, 1 / layers)
        ),
        "Every head has its scores: multiply by heads.": share(attention=1 / heads),
    }
    if heads == kv_heads:
        return wrong
    return {
        "Grouped heads share keys and values, but every query head computes scores of its own: "
        "count heads, not kv_heads, in attention.": share(attention=kv_heads / heads),
        "K and V are projected to kv_heads * head_dim columns, not to heads * head_dim.": share(
            kv_projections=heads / kv_heads
        ),
        **wrong,
    }


def _share(
    seqlen: int,
    causal: bool,
    *,
    hidden: int,
    layers: int,
    intermediate: int,
    vocab: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    attention: float = 1.0,
    q_projection: float = 1.0,
    kv_projections: float = 1.0,
    o_projection: float = 1.0,
    mlp: float = 1.0,
    lm_head: float = 1.0,
    matrices: float = 1.0,
    projections_count: bool = False,
) -> float:
    """Attention's share of the FLOPs; each factor weighs one term, and is 1 if that is right."""
    scores = 4 * seqlen**2 * head_dim * heads * layers * attention * (0.5 if causal else 1)
    one = 2 * seqlen * hidden * head_dim
    projections = one * layers * matrices
    projections *= heads * (q_projection + o_projection) + 2 * kv_heads * kv_projections
    in_mlp = 3 * 2 * seqlen * hidden * intermediate * layers * mlp * matrices
    in_head = 2 * seqlen * hidden * vocab * lm_head * matrices
    total = scores + projections + in_mlp + in_head
    counted = scores + projections if projections_count else scores
    return counted / total
