"""Exercise 4-2: elements that pass between slow and fast memory, counted by hand.

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

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labsupport.analysis.traffic import count
from labsupport.checks.counting_numbers import compare, numbers
from labsupport.checks.verdict import CheckFailed, Mistake, call, passed

VERSIONS = {"queries": "version2", "keys": "version1"}
NAMES = ("read", "written")
COUNTED = 128  # lengths up to this one are really run

Problem = dict[str, Any]


def textbook_traffic(seqlen: int, head_dim: int, block_q: int) -> tuple[int, int]:
    """Return the elements read and written by textbook attention; see the top of this file."""
    square, matrix, passes = seqlen**2, seqlen * head_dim, seqlen // block_q
    read = (matrix + passes * matrix) + square + (square + passes * matrix)
    written = square + square + matrix
    return read, written


def tiled_traffic(
    seqlen: int, head_dim: int, block_q: int, block_k: int, *, outside: str, causal: bool = False
) -> tuple[int, int]:
    """Return the elements read and written by a tiled loop; see the top of this file."""
    tiles = (seqlen // block_q) * (seqlen // block_k)
    if causal:
        tiles = sum(math.ceil(end / block_k) for end in range(block_q, seqlen + 1, block_q))
    matrix, rows, cols = seqlen * head_dim, block_q * head_dim, block_k * head_dim
    if outside == "queries":
        read = matrix + tiles * 2 * cols
        written = matrix + seqlen
    else:
        read = 2 * matrix + tiles * (2 * rows + 2 * block_q)
        written = (matrix + 2 * seqlen) + tiles * (rows + 2 * block_q)
    return read, written


_ANY_MISTAKES = (
    Mistake(("read, written\n", "4 * read, 4 * written\n"), "That is in bytes; count elements."),
    Mistake(
        ("read, written\n", "written, read\n"), "The two values are swapped: return read, written."
    ),
)
TEXTBOOK_MISTAKES = (
    Mistake(
        ("seqlen // block_q", "1"),
        "K passes for *each* block of rows of Q, seqlen / block_q times; so does V.",
    ),
    Mistake(
        ("(square + passes * matrix)", "(square + matrix)"),
        "K and V both pass for each block of rows; one of them passes once in your count.",
    ),
    Mistake(
        ("seqlen // block_q", "seqlen"),
        "K and V pass once for each *block* of rows, seqlen / block_q times, not for each row.",
    ),
    Mistake(
        ("seqlen // block_q", "seqlen * block_q"),
        "There are seqlen / block_q blocks: divide, do not multiply.",
    ),
    Mistake(
        ("seqlen**2", "0"),
        "S and P are missing: one kernel writes them to slow memory, the next one reads them.",
    ),
    Mistake(
        ("(square + passes", "(passes"),
        "One matrix of N^2 is not read: the softmax reads S, the second product P.",
    ),
    Mistake(
        ("square + square", "square"),
        "One matrix of N^2 is not written: the first product writes S, the softmax P.",
    ),
    Mistake(("square + matrix", "square"), "O is missing from what is written."),
    Mistake(("(matrix + passes", "(passes"), "Q is missing from what is read."),
    *_ANY_MISTAKES,
    Mistake(
        ("read, written\n", "(read + written,) * 2\n"),
        "That is the sum of both. Return what is read and what is written, apart.",
    ),
)
TILED_MISTAKES = (
    Mistake(
        ('"queries"', '"keys"'),
        "The two loop orders are exchanged: with outside='queries' a block of Q stays, with "
        "outside='keys' a block of K and V.",
    ),
    Mistake(
        ('outside == "queries"', "True"),
        "`outside` is ignored: you count queries outside in either order.",
    ),
    Mistake(
        ('outside == "queries"', "False"),
        "`outside` is ignored: you count keys outside in either order.",
    ),
    Mistake(
        ("tiles * 2 * cols", "tiles * cols", "2 * matrix", "matrix"),
        "K *and* V pass: 2 * block_k * head_dim for a block of keys.",
    ),
    Mistake(
        ("tiles * 2 * cols", "2 * matrix"),
        "With queries outside, K and V pass for *each* block of queries: seqlen / block_q times.",
    ),
    Mistake(
        ("rows, cols", "cols, rows", "2 * block_q)", "2 * block_k)"),
        "K and V pass once for each block of *queries* (seqlen / block_q), and Q, O once for each "
        "block of *keys* (seqlen / block_k): you divide by the other block.",
    ),
    Mistake(
        ("matrix + tiles * 2 * cols", "tiles * (rows + 2 * cols)"),
        "With queries outside, a block of Q stays: it is read once, not for each tile.",
    ),
    Mistake(
        ("matrix + seqlen", "matrix"),
        "With queries outside, L is missing from what is written: one number a row.",
    ),
    Mistake(("matrix + seqlen", "2 * matrix"), "L has one number a row, not head_dim."),
    Mistake(
        ("matrix + seqlen", "tiles * rows + seqlen"),
        "With queries outside, O stays in fast memory: it is written once.",
    ),
    Mistake(
        (" + 2 * block_q", "", " + 2 * seqlen", ""),
        "With keys outside, m and l are fetched and written back together with O.",
    ),
    Mistake(
        ("(matrix + 2 * seqlen) +", ""),
        "With keys outside, O, m and l begin with zeros (or -inf) that are written.",
    ),
    Mistake(
        ("(2 * rows", "(rows"),
        "With keys outside, O has to be read again for each tile, not only written.",
    ),
    Mistake(
        ("tiles * (rows + 2 * block_q)", "matrix + 2 * seqlen"),
        "With keys outside, O, m and l are written back for each tile: the next block of keys "
        "needs the rows of all queries.",
    ),
    Mistake(
        ("2 * matrix + tiles * (2 * rows", "3 * matrix + tiles * (rows"),
        "With keys outside, Q is read for each block of keys: it does not stay.",
    ),
    Mistake(
        (
            "return",
            "read, written = (x + tiles * block_q * block_k for x in (read, written))\n    return",
        ),
        "S never leaves fast memory: it must not be counted.",
    ),
    *_ANY_MISTAKES,
)
_TILES = "sum(math.ceil(end / block_k) for end in range(block_q, seqlen + 1, block_q))"
CAUSAL_MISTAKES = (
    Mistake(
        ("if causal", "if False"), "`causal` is ignored: a tile without a visible pair is skipped."
    ),
    Mistake(
        (_TILES, "tiles / 2"),
        "More than half of the tiles have a visible pair: those on the diagonal do, too.",
    ),
    Mistake(
        ("math.ceil(end / block_k)", "(end - block_q) // block_k"),
        "The tiles on the diagonal are missing: a part of their pairs is visible, so they move.",
    ),
    Mistake(
        (_TILES, "(seqlen // block_q) * (seqlen // block_q + 1) / 2"),
        "T (T + 1) / 2 holds for square tiles. A block of queries sees keys up to its *last* row: "
        "ceil((r + 1) * block_q / block_k) blocks, for r = 0, 1, ...",
    ),
    Mistake(
        ("math.ceil(end / block_k)", "(end - block_q) // block_k + 1"),
        "You go by each block's first row. Its last row sees the most keys: round up.",
    ),
    Mistake(
        ("math.ceil(end / block_k)", "end // block_k"),
        "A block of keys of which one key is visible passes whole: round up.",
    ),
    Mistake(
        (_TILES, "seqlen * (seqlen + 1) / 2 / block_q / block_k"),
        "You count visible pairs. A block of keys passes whole: count tiles.",
    ),
    Mistake(
        ("tiles * (rows", "(seqlen // block_q) * (seqlen // block_k) * (rows"),
        "Skipped tiles save what would be written, too.",
    ),
    *TILED_MISTAKES,
)


def check_textbook_traffic(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-2 (a): what three kernels move."""
    cases = [
        {name: case[name] for name in ("seqlen", "head_dim", "block_q")} for case in _sizes(seed)
    ]
    _judge(student, cases, textbook_traffic, TEXTBOOK_MISTAKES)
    passed("what the textbook's three kernels move", seed)


def check_tiled_traffic(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-2 (b): what two loop orders move, without a mask."""
    cases = [{**case, "outside": order} for case in _sizes(seed) for order in VERSIONS]
    _judge(student, cases, tiled_traffic, TILED_MISTAKES)
    passed("what the two loop orders move", seed)


def check_tiled_causal(student: Callable[..., Any], seed: int = 0) -> None:
    """Exercise 4-2 (c): what is left of it under a causal mask."""
    cases = [
        {**case, "outside": order, "causal": True} for case in _sizes(seed) for order in VERSIONS
    ]
    _judge(student, cases, tiled_traffic, CAUSAL_MISTAKES)
    passed("what the two loop orders move under a causal mask", seed)


def _judge(
    student: Callable[..., Any],
    cases: Sequence[Problem],
    solution: Callable[..., tuple[int, int]],
    mistakes: Sequence[Mistake],
) -> None:
    given = [numbers(call(student, **case), NAMES) for case in cases]
    wrong = compare(given, solution, mistakes, lambda f: [f(**case) for case in cases])
    if wrong is None:
        return
    i, said = wrong
    case, right = cases[i], solution(**cases[i])
    sizes = ", ".join(f"{name} {value}" for name, value in case.items())
    off = " and ".join(name for j, name in enumerate(NAMES) if given[i][j] != right[j])
    truth = f"{off} {'are' if 'and' in off else 'is'} off: {_counted(case)}"
    raise CheckFailed(
        f"for {sizes} you return {given[i][0]:,.0f} read and {given[i][1]:,.0f} written. "
        f"{said or truth}"
    )


def _counted(case: Problem) -> str:
    """Return what a memory that counts sees of the case, tensor by tensor; small cases are run."""
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
