"""Exercise 2-4: how much faster a model gets when only its attention does."""

from __future__ import annotations

import math
import random

from labsupport.checks.verdict import Student, judge_numbers, mistakes, passed

SHAPE = ("hidden", "layers", "intermediate", "vocab", "heads", "kv_heads", "head_dim")
LLAMA_1B = dict(zip(SHAPE, (2048, 16, 8192, 128_256, 32, 8, 64), strict=True))
SMOLLM2 = dict(zip(SHAPE, (576, 30, 1536, 49_152, 9, 3, 64), strict=True))


### BEGIN SOLUTION
def overall_speedup(share: float, speedup: float) -> float:
    """Return how many times as fast the whole becomes, by Amdahl's law.

    Args:
        share: the fraction of the time, 0 to 1, that the faster part took.
        speedup: how many times as fast that part becomes.

    Source: G. Amdahl, "Validity of the single processor approach" (AFIPS 1967).

    >>> overall_speedup(share=0.5, speedup=4)
    1.6
    """
    return 1 / (1 - share + share / speedup)


SPEEDUP_MISTAKES = mistakes("""
That is share * speedup. Add up times, not speed-ups.
    1 / (1 - share + share / speedup) -> share * speedup
That is the time that is left, relative to before; the speed-up is its inverse.
    return 1 / -> return
The part that attention does not touch is missing: it takes 1 - share, as before.
    1 - share + ->
That is the limit for an infinite speed-up; attention still takes share / speedup.
    + share / speedup ->
That takes share / speedup off the old time. Take off share, and add share / speedup.
    1 - share + share / speedup -> 1 - share / speedup
The two parts are swapped: share is what gets faster.
    1 - share + share / speedup -> share + (1 - share) / speedup
""")


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

    With `causal`, half of the pairs of query and key are hidden.

    >>> round(flop_share(2048, 576, 30, 1536, 49_152, 9, 3, 64), 2)  # SmolLM2
    0.21
    """
    projections = hidden * (2 * heads + 2 * kv_heads) * head_dim
    mlp = 3 * hidden * intermediate
    rest = 2 * seqlen * (layers * (projections + mlp) + hidden * vocab)
    attention_flops = layers * heads * 4 * seqlen**2 * head_dim / (2 if causal else 1)
    return attention_flops / (attention_flops + rest)


SHARE_MISTAKES = mistakes("""
Every query head computes its own scores: count heads, not kv_heads, in attention.
    layers * heads -> layers * kv_heads
K and V are projected to kv_heads * head_dim columns, not to heads * head_dim.
    2 * kv_heads -> 2 * heads
The causal mask hides half of the pairs: half of attention's FLOPs are left.
    (2 if causal else 1) -> 1
A gated MLP has three matrices: gate, up and down.
    3 * hidden -> 2 * hidden
The output layer (lm_head, hidden x vocab) is missing.
    + hidden * vocab ->
Attention is two products, Q K^T and P V: 4 * seqlen^2 * head_dim a head.
    heads * 4 -> heads * 2
A multiply-add counts as 2 FLOPs in the matrices as well as in attention.
    2 * seqlen * ( -> seqlen * (
The projection of the output (o, heads * head_dim to hidden) is missing.
    (2 * heads + -> (heads +
The projections of q, k, v and o are missing.
    (projections + mlp) -> mlp
q and o are hidden x (heads * head_dim), which is not hidden x hidden in every model.
    (2 * heads + 2 * kv_heads) * head_dim -> 2 * (hidden + kv_heads * head_dim)
""")
### END SOLUTION


def check_amdahl(student: Student, seed: int = 0) -> None:
    """Exercise 2-4: the overall speed-up, if a share of the time is sped up."""
    rng = random.Random(seed)
    cases = [(0.5, 2.0), (0.3, 10.0), (0.9, 100.0), (0.4, 0.5)]
    cases += [(rng.uniform(0.1, 0.9), rng.uniform(1.5, 20)) for _ in range(3)]
    for some in (cases, [(0.0, 5.0), (1.0, 5.0), (0.75, math.inf)]):
        judge_numbers(student, some, overall_speedup, SPEEDUP_MISTAKES, ("the speed-up",))
    passed("the new time is the untouched part and the faster part", seed)


def check_attention_share(student: Student, seed: int = 0) -> None:
    """Exercise 2-4: the share of attention in the FLOPs of a Llama's prefill."""
    rng = random.Random(seed)
    shapes = [LLAMA_1B, SMOLLM2, dict(SMOLLM2, kv_heads=9), dict(SMOLLM2, heads=8, kv_heads=2)]
    for _ in range(2):
        kv_heads = rng.randint(1, 8)
        drawn = (rng.randrange(256, 4096, 64), rng.randint(2, 80), rng.randrange(512, 8192, 64))
        heads = (kv_heads * rng.randint(1, 8), kv_heads, rng.choice([64, 96, 128]))
        shapes.append(dict(zip(SHAPE, (*drawn, rng.randint(1000, 128_000), *heads), strict=True)))
    cases = [
        {"seqlen": seqlen, **shape, **options}
        for shape in shapes
        for seqlen in (512, 8192, 100_000)
        for options in ({"causal": True}, {"causal": False}, {})
    ]
    judge_numbers(student, cases, flop_share, SHARE_MISTAKES, ("the share",))
    passed("attention's share of the FLOPs, by the counting rules", seed)
