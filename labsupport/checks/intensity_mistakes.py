"""What typical wrong solutions of exercise 4-1 compute, and what to say of each."""

from __future__ import annotations

from typing import Any

from labsupport.checks.counting_numbers import Numbers

Shape = dict[str, Any]

FLOP_MISTAKES = {
    "multiply-add once": (
        "A multiply-add counts as 2 FLOPs: 2 * head_dim for each visible pair and product."
    ),
    "one product": (
        "The forward pass has two products, Q K^T and P V: 4 * head_dim for each visible pair."
    ),
    "kv_heads": (
        "Grouped heads share keys, but every query head computes scores of its own: count heads, "
        "not kv_heads."
    ),
    "no heads": "Every head has scores of its own: multiply by heads.",
    "no batch": "Multiply by batch.",
    "causal ignored": "`causal` is ignored: hidden pairs are not computed.",
    "always causal": "Pairs are hidden only with causal=True.",
    "half": (
        "The mask does not hide half of the pairs. The diagonal is visible: N (N + 1) / 2 of N^2. "
        "And with fewer queries than keys, every query sees all the keys before the queries too."
    ),
    "half of the last square": (
        "The diagonal is visible: N (N + 1) / 2 pairs are left of N^2, not N^2 / 2."
    ),
    "strict": "A query sees its own position: the diagonal counts.",
    "top-left": (
        "That mask is aligned top-left. The queries are the last tokens (bottom-right): query i "
        "sees seqlen_k - seqlen_q + i + 1 keys."
    ),
    "queries squared": "There are seqlen_q * seqlen_k pairs, not seqlen_q**2.",
    "keys squared": "There are seqlen_q * seqlen_k pairs, not seqlen_k**2.",
    "backward ignored": "`backward` is ignored: that pass has five products, not two.",
    "S not again": (
        "The backward pass has five products: S = Q K^T once more, because nobody stored it; "
        "dV, dP, dQ and dK."
    ),
    "both passes": "With backward=True the backward pass alone is meant: the forward is not in it.",
    "swapped": "The two values are swapped: return flops, moved.",
}
BYTE_MISTAKES = {
    "elements": "That counts numbers; a number of Q takes dtype.itemsize bytes.",
    "4 bytes": "`dtype` is ignored: you always count 4 bytes a number.",
    "2 bytes": "`dtype` is ignored: you always count 2 bytes a number.",
    "heads for K": (
        "K and V have kv_heads heads: a group of query heads shares one, and it moves once."
    ),
    "kv_heads for Q": "Q and O have heads heads, not kv_heads.",
    "queries for K": "K and V have seqlen_k rows, not seqlen_q.",
    "keys for Q": "Q and O have seqlen_q rows, not seqlen_k.",
    "no L": "L is missing: float32, one number for each query of each head.",
    "L in dtype": "L is float32 whatever dtype is: 4 bytes a number.",
    "L wide": "L has one number for each query of each head, not head_dim.",
    "no O": "O is missing: it passes too.",
    "no V": "V is missing: K and V are two tensors.",
    "no Q": "Q is missing: it passes too.",
    "scores": (
        "That counts S and P as well. A fused kernel keeps them in fast memory: they need not move."
    ),
    "K halved": (
        "A causal mask hides pairs, but no key from every query: all of K and V still has to move."
    ),
    "no batch": "Multiply by batch.",
    "backward ignored": "`backward` is ignored: that pass reads O, dO and writes dQ, dK, dV too.",
    "no dO": "In the backward pass dO is missing: the gradient that comes in.",
    "no O in backward": "In the backward pass O is missing: D = rowsum(dO * O) needs it.",
    "no gradients": "In the backward pass the results are missing: dQ, dK and dV are written.",
    "no dK": "In the backward pass dK and dV are missing: they are written.",
    "heads for dK": (
        "dK and dV have the shape of K and V: kv_heads heads. (What the query heads of a group "
        "contribute is added up before it is written.)"
    ),
    "both passes": "With backward=True the backward pass alone is meant: the forward is not in it.",
}
TIME_MISTAKES = {
    "sum": "You added the two times. They overlap: the longer one is the bound.",
    "shorter": "That is the shorter of the two times. Both must be over: take the longer one.",
    "arithmetic only": "The time for the bytes is ignored: it is the longer one sometimes.",
    "memory only": "The time for the FLOPs is ignored: it is the longer one sometimes.",
    "seconds": "That is in seconds; return milliseconds.",
    "microseconds": "That is in microseconds; return milliseconds.",
    "binary": "A GB is 10^9 bytes here, not 2^30.",
}


def flops_with(shape: Shape, mistake: str = "") -> float:
    """FLOPs of one pass, with one mistake; right without."""
    n_q, n_k = shape["seqlen_q"], shape["seqlen_k"]
    square = {"queries squared": n_q**2, "keys squared": n_k**2}.get(mistake, n_q * n_k)
    pairs: float = square
    causal = shape["causal"] or mistake == "always causal"
    if causal and mistake != "causal ignored":
        before = n_q * (n_k - n_q)
        pairs = {
            "half": square / 2,
            "half of the last square": square - n_q**2 / 2,
            "strict": before + n_q * (n_q - 1) / 2,
            "top-left": n_q * (n_q + 1) / 2,
        }.get(mistake, square - n_q * (n_q - 1) / 2)
    factor: float = {"one product": 2}.get(mistake, 4)
    if shape["backward"]:
        factor = {"backward ignored": 4, "S not again": 8, "both passes": 14}.get(mistake, 10)
    heads = {"kv_heads": shape["kv_heads"], "no heads": 1}.get(mistake, shape["heads"])
    batch = 1 if mistake == "no batch" else shape["batch"]
    factor *= 0.5 if mistake == "multiply-add once" else 1
    if mistake == "swapped":
        return bytes_with(shape)
    return factor * batch * heads * pairs * shape["head_dim"]


def bytes_with(shape: Shape, mistake: str = "") -> float:
    """Bytes of one pass, with one mistake; right without."""
    batch = 1 if mistake == "no batch" else shape["batch"]
    n_q, n_k, d = shape["seqlen_q"], shape["seqlen_k"], shape["head_dim"]
    heads, kv_heads = shape["heads"], shape["kv_heads"]
    size = {"elements": 1, "4 bytes": 4, "2 bytes": 2}.get(mistake, shape["dtype"].itemsize)
    of_q = batch * (kv_heads if mistake == "kv_heads for Q" else heads) * d * size
    of_q *= n_k if mistake == "keys for Q" else n_q
    of_k = batch * (heads if mistake == "heads for K" else kv_heads) * d * size
    of_k *= n_q if mistake == "queries for K" else n_k
    of_k *= 0.5 if mistake == "K halved" and shape["causal"] else 1
    of_l = batch * heads * n_q * 4
    of_l = {"no L": 0, "L wide": of_l * d, "L in dtype": of_l / 4 * size}.get(mistake, of_l)
    of_l = of_l / 4 if mistake == "elements" else of_l
    forward = {"no O": 1, "no Q": 1}.get(mistake, 2) * of_q
    forward += (1 if mistake == "no V" else 2) * of_k + of_l
    squares = 2 * batch * heads * n_q * n_k * size if mistake == "scores" else 0
    if not shape["backward"] or mistake == "backward ignored":
        return forward + squares
    of_dk = batch * heads * n_k * d * size if mistake == "heads for dK" else of_k
    queries = {"no dO": 3, "no O in backward": 3, "no O": 3, "no Q": 3, "no gradients": 3}
    results = {"no gradients": 0, "no dK": 0}.get(mistake, 2)
    keys = (1 if mistake == "no V" else 2) * of_k
    backward = queries.get(mistake, 4) * of_q + keys + results * of_dk + of_l
    return backward + squares + (forward if mistake == "both passes" else 0)


def time_with(flops: float, moved: float, tflops: float, gb_s: float, mistake: str) -> Numbers:
    """The least time in ms, with one mistake."""
    arithmetic, memory = flops / tflops / 1e9, moved / gb_s / 1e6
    right = max(arithmetic, memory)
    return (
        {
            "sum": arithmetic + memory,
            "shorter": min(arithmetic, memory),
            "arithmetic only": arithmetic,
            "memory only": memory,
            "seconds": right / 1e3,
            "microseconds": right * 1e3,
            "binary": max(arithmetic, memory * 1e9 / 2**30),
        }[mistake],
    )
