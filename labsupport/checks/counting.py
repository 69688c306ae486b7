"""Checks of exercise 4-2: elements that pass between slow and fast memory, counted by hand.

One head of N queries and N keys, forward; blocks divide N. All counts are in elements. What
`labsupport.analysis.traffic.count` sees while the algorithms run is the reference.

    textbook_traffic(seqlen, head_dim, block_q) -> (read, written)

    Three kernels, no mask. S = Q K^T: a block of block_q rows of Q stays while all of K passes. The
    softmax reads S row by row (a row fits) and writes P. O = P V: for each block of rows of O, the
    rows of P pass once, and all of V passes. The scale costs nothing.

    tiled_traffic(seqlen, head_dim, block_q, block_k, *, outside, causal=False) -> (read, written)

    outside="queries" (FlashAttention-2): a block of Q is read once, K and V pass block by block,
    then O and L are written; L has one number a row. outside="keys" (FlashAttention's first
    version): zeros are written to O, m and l first; then a block of K and V is read once, and for
    each block of queries Q, O, m, l are read and O, m, l written; m and l have one number a row.
    With causal=True a tile without a visible pair is skipped: nothing moves for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labsupport.analysis.traffic import Sizes, closed_form, count
from labsupport.checks.counting_numbers import Numbers, explanation, first_wrong, numbers
from labsupport.checks.verdict import CheckFailed, call, passed

QUERIES, KEYS = "queries", "keys"
VERSIONS = {QUERIES: "version2", KEYS: "version1"}
NAMES = ("read", "written")
COUNTED = 128  # lengths up to this one are really run

TEXTBOOK_MISTAKES = {
    "K and V once": (
        "All of K passes for *each* block of rows of Q, seqlen / block_q times; so does V in the "
        "second product."
    ),
    "one of K and V once": (
        "Both K and V pass for each block of rows, seqlen / block_q times; one of them passes once "
        "in your count."
    ),
    "for each row": (
        "K and V pass once for each *block* of rows, seqlen / block_q times, not for each row."
    ),
    "times block_q": "There are seqlen / block_q blocks: divide, do not multiply.",
    "no squares": (
        "S and P are missing: each kernel writes its result to slow memory, and the next one reads "
        "it from there."
    ),
    "one square read": (
        "One matrix of N^2 is missing from what is read: the softmax reads S, the second product "
        "reads P."
    ),
    "one square written": (
        "One matrix of N^2 is missing from what is written: the first product writes S, the "
        "softmax writes P."
    ),
    "no O": "O is missing from what is written.",
    "no Q": "Q is missing from what is read.",
    "bytes": "That is in bytes; count elements.",
    "swapped": "The two values are swapped: return read, written.",
    "added": "That is the sum of both. Return what is read and what is written, apart.",
}
TILED_MISTAKES = {
    "other order": (
        "The two loop orders are exchanged: with outside='queries' a block of Q stays, with "
        "outside='keys' a block of K and V."
    ),
    "outside ignored": "`outside` is ignored: you count queries outside in either order.",
    "outside ignored, keys": "`outside` is ignored: you count keys outside in either order.",
    "K only": "K *and* V pass: 2 * block_k * head_dim for a block of keys.",
    "K and V once": (
        "With queries outside, K and V pass once for *each* block of queries: seqlen / block_q "
        "times."
    ),
    "wrong blocks": (
        "K and V pass once for each block of *queries* (seqlen / block_q), and Q, O once for each "
        "block of *keys* (seqlen / block_k): you divide by the other block."
    ),
    "Q again": "With queries outside, a block of Q stays: it is read once, not for each tile.",
    "no L": "With queries outside, L is missing from what is written: one number a row.",
    "L wide": "L has one number a row, not head_dim.",
    "O for each tile": "With queries outside, O stays in fast memory: it is written once.",
    "no m and l": "With keys outside, m and l are fetched and written back together with O.",
    "no zeros": "With keys outside, O, m and l begin with zeros (or -inf) that are written.",
    "O not read": "With keys outside, O has to be read again for each tile, not only written.",
    "O once": (
        "With keys outside, O, m and l are written back for each tile: the next block of keys "
        "needs the rows of all queries."
    ),
    "Q once": "With keys outside, Q is read for each block of keys: it does not stay.",
    "tiles of S": "S never leaves fast memory: it must not be counted.",
    "bytes": "That is in bytes; count elements.",
    "swapped": "The two values are swapped: return read, written.",
}
CAUSAL_MISTAKES = {
    "causal ignored": "`causal` is ignored: a tile without a visible pair is skipped.",
    "half of the tiles": (
        "More than half of the tiles have a visible pair: those on the diagonal do, too."
    ),
    "tiles below": (
        "The tiles on the diagonal are missing: a part of their pairs is visible, so they move."
    ),
    "by equal blocks": (
        "T (T + 1) / 2 holds for square tiles. A block of queries sees keys up to its *last* row: "
        "ceil((r + 1) * block_q / block_k) blocks, for r = 0, 1, ..."
    ),
    "first row": (
        "You go by the first row of each block of queries. Its last row sees the most keys: "
        "ceil((r + 1) * block_q / block_k) blocks."
    ),
    "floor": "A block of keys of which one key is visible passes whole: round up.",
    "pairs": (
        "You count visible pairs. A block of keys of which one key is visible passes whole: count "
        "tiles."
    ),
    "reads only": "Skipped tiles save what would be written, too.",
}
Problem = dict[str, Any]


def textbook_traffic(seqlen: int, head_dim: int, block_q: int) -> tuple[int, int]:
    """Elements read and written by textbook attention; see the top of this file."""
    return closed_form("standard", "forward", Sizes(seqlen, seqlen, head_dim, block_q, 1))


def tiled_traffic(
    seqlen: int, head_dim: int, block_q: int, block_k: int, *, outside: str, causal: bool = False
) -> tuple[int, int]:
    """Elements read and written by a tiled loop; see the top of this file."""
    sizes = Sizes(seqlen, seqlen, head_dim, block_q, block_k, causal)
    return closed_form(VERSIONS[outside], "forward", sizes)


def check_textbook_traffic(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-2 (a): what three kernels move.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    cases = [
        {name: case[name] for name in ("seqlen", "head_dim", "block_q")} for case in _sizes(seed)
    ]
    given = [numbers(call(student, **case), NAMES) for case in cases]
    _judge(given, cases, textbook_traffic, TEXTBOOK_MISTAKES, _textbook)
    passed("what the textbook's three kernels move", seed)


def check_tiled_traffic(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-2 (b): what two loop orders move, without a mask.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    cases = [{**case, "outside": order} for case in _sizes(seed) for order in VERSIONS]
    given = [numbers(call(student, **case), NAMES) for case in cases]
    _judge(given, cases, tiled_traffic, TILED_MISTAKES, _tiled)
    passed("what the two loop orders move", seed)


def check_tiled_causal(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-2 (c): what is left of it under a causal mask.

    Raises:
        CheckFailed: naming the likely mistake.
    """
    cases = [
        {**case, "outside": order, "causal": True} for case in _sizes(seed) for order in VERSIONS
    ]
    given = [numbers(call(student, **case), NAMES) for case in cases]
    _judge(given, cases, tiled_traffic, CAUSAL_MISTAKES | TILED_MISTAKES, _tiled)
    passed("what the two loop orders move under a causal mask", seed)


def _judge(
    given: Sequence[Numbers],
    cases: Sequence[Problem],
    ours: Callable[..., tuple[int, int]],
    mistakes: dict[str, str],
    wrong: Callable[[Problem, str], Numbers],
) -> None:
    right = [ours(**case) for case in cases]
    i = first_wrong(given, right)
    if i is None:
        return
    said = explanation(given, mistakes, lambda m: [wrong(case, m) for case in cases])
    case = cases[i]
    sizes = ", ".join(f"{name} {value}" for name, value in case.items())
    off = " and ".join(name for j, name in enumerate(NAMES) if given[i][j] != right[i][j])
    truth = f"{off} {'are' if 'and' in off else 'is'} off: {_counted(case)}"
    raise CheckFailed(
        f"for {sizes} you return {given[i][0]:,.0f} read and {given[i][1]:,.0f} written. "
        f"{said or truth}"
    )


def _counted(case: Problem) -> str:
    """What a memory that counts sees of the case, tensor by tensor; small cases are really run."""
    algorithm = VERSIONS[case["outside"]] if "outside" in case else "standard"
    n, d = min(case["seqlen"], COUNTED), case["head_dim"]
    q, k, v = torch.randn(3, n, d, generator=torch.Generator().manual_seed(0)).double()
    block_q, block_k = (min(case.get(name, n), n) for name in ("block_q", "block_k"))
    causal = case.get("causal", False)
    run = count(algorithm, q, k, v, causal=causal, block_q=block_q, block_k=block_k)
    at = "" if n == case["seqlen"] else f"with seqlen {n}, "
    return (
        f"{at}a memory that counts sees {_listed(run.read)} read, {_listed(run.written)} written."
    )


def _listed(moved: dict[str, int]) -> str:
    return ", ".join(f"{name} {elements:,}" for name, elements in moved.items())


def _textbook(case: Problem, mistake: str) -> Numbers:
    n, d, block = case["seqlen"], case["head_dim"], case["block_q"]
    square, nd = n * n, n * d
    blocks = {"for each row": n, "times block_q": n * block}.get(mistake, n // block)
    again = {"K and V once": 0, "one of K and V once": 1}.get(mistake, 2)
    passes = (again * blocks + 2 - again) * nd
    squares_read = {"no squares": 0, "one square read": 1}.get(mistake, 2)
    squares_written = {"no squares": 0, "one square written": 1}.get(mistake, 2)
    read = passes + squares_read * square + (0 if mistake == "no Q" else nd)
    written = squares_written * square + (0 if mistake == "no O" else nd)
    return _as_returned(read, written, mistake)


def _tiled(case: Problem, mistake: str) -> Numbers:
    n, d = case["seqlen"], case["head_dim"]
    block_q, block_k, outside = case["block_q"], case["block_k"], case["outside"]
    if mistake == "other order":
        outside = KEYS if outside == QUERIES else QUERIES
    outside = {"outside ignored": QUERIES, "outside ignored, keys": KEYS}.get(mistake, outside)
    nd, tiles = n * d, _tiles(case, mistake)
    if mistake == "wrong blocks":
        block_q, block_k = block_k, block_q
    keys = block_k * d * (1 if mistake == "K only" else 2)
    queries = block_q * d
    if outside == QUERIES:
        read = 2 * nd if mistake == "K and V once" else tiles * keys
        read += tiles * queries if mistake == "Q again" else nd
        written = tiles * queries if mistake == "O for each tile" else nd
        written += {"no L": 0, "L wide": nd}.get(mistake, n)
    else:
        column = 0 if mistake == "no m and l" else 2
        read = (1 if mistake == "K only" else 2) * nd
        read += tiles * (queries * (1 if mistake == "O not read" else 2) + column * block_q)
        read -= (tiles * queries - nd) if mistake == "Q once" else 0
        whole = _tiles(case, "causal ignored") if mistake == "reads only" else tiles
        written = whole * (queries + column * block_q)
        written = nd + column * n if mistake == "O once" else written
        written += 0 if mistake == "no zeros" else nd + column * n
    if mistake == "tiles of S":
        read, written = (x + tiles * block_q * block_k for x in (read, written))
    return _as_returned(read, written, mistake)


def _as_returned(read: float, written: float, mistake: str) -> Numbers:
    if mistake == "bytes":
        return 4 * read, 4 * written
    if mistake == "added":
        return read + written, read + written
    return (written, read) if mistake == "swapped" else (read, written)


def _tiles(case: Problem, mistake: str) -> float:
    n, block_q, block_k = case["seqlen"], case["block_q"], case["block_k"]
    rows, cols = n // block_q, n // block_k
    if not case.get("causal") or mistake == "causal ignored":
        return rows * cols
    last = [(r + 1) * block_q for r in range(rows)]
    return {
        "half of the tiles": rows * cols / 2,
        "tiles below": sum((end - block_q) // block_k for end in last),
        "by equal blocks": rows * (rows + 1) / 2,
        "first row": sum((end - block_q) // block_k + 1 for end in last),
        "floor": sum(end // block_k for end in last),
        "pairs": n * (n + 1) / 2 / block_q / block_k,
    }.get(mistake, sum(-(-end // block_k) for end in last))


def _sizes(seed: int) -> list[Problem]:
    """Blocks of queries larger and smaller than blocks of keys; the first ones can be run."""
    draw = random.Random(seed)
    listed = [(64, 8, 16, 8), (96, 4, 8, 24), (2048, 128, 128, 64)]
    for _ in range(3):
        unit, a, b = draw.choice([8, 16]), draw.choice([2, 4, 6]), draw.choice([3, 5, 7])
        listed.append((unit * a * b * 4, draw.choice([24, 48, 64]), unit * a, unit * b))
    return [
        dict(zip(("seqlen", "head_dim", "block_q", "block_k"), one, strict=True)) for one in listed
    ]
