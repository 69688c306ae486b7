"""Tiles that fit into a fast memory, and what they move: one head, forward.

All figures come from the closed forms of `labsupport.analysis.traffic`: numbers of one dtype, in
one fast memory M, the one of a single processor.

A kernel is not this model. It keeps O, S and the running sums in registers (256 KiB more on a
multiprocessor), in float32, and holds several blocks of K and V at a time; L2 lies on the slow
side of the count. So a pair that does not fit here can run on a GPU, and the smallest B_c, which
the count likes, leaves tensor cores waiting.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from labsupport.analysis.traffic.formulas import closed_form, elements_needed, theorem
from labsupport.analysis.traffic.problem import Sizes
from labsupport.profiling.grids import ITEMSIZE
from labsupport.profiling.hardware import read_specs
from labsupport.profiling.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

SMALLEST_BLOCK = 16  # 16: the smallest tile that tensor cores multiply
ORDERS = {"version2": "queries outside (version 2)", "version1": "keys outside (version 1)"}
# The block that stays brings a second one of its size (Q and O, K and V), so B <= M / 2d. This many
# times N^2 d^2 / M moves if there is nothing else in M: 2 N^2 d / B_r, and 3 N^2 d / B_c.
LEAST_CONSTANT = {"version2": 4, "version1": 6}
WITHOUT_ASKING_KIB = 48  # shared memory of a block of threads that asks for no more: any GPU


def tile_choices(
    seqlen: int,
    head_dim: int,
    *,
    fast_bytes: int,
    dtype: str = "bfloat16",
    causal: bool = False,
    order: str = "version2",
) -> pd.DataFrame:
    """Table of what each pair of blocks needs and moves: one head, forward.

    Args:
        seqlen: N, queries and keys; a multiple of 16.
        head_dim: d.
        fast_bytes: M in bytes.
        dtype: of everything; the closed forms count elements.
        causal: tiles that the mask hides do not pass.
        order: "version2" (queries outside) or "version1" (keys outside).

    Returns:
        A row for each B_r, B_c out of 16, 32, ... 1024 that divide N: block_q, block_k, fits,
        needed_bytes (at a time), read_bytes, written_bytes, traffic_bytes, times_compulsory,
        times_textbook (below 1: less than the textbook's), theorem_bytes (what this loop order
        moves at least in a memory of needed_bytes: N^2 d^2 / M times LEAST_CONSTANT; with a mask
        the visible pairs stand in the place of N^2).
        `.attrs["case"]` keeps the arguments, and compulsory_bytes (each tensor once) and
        textbook_bytes (with its own best blocks; NaN if none fits).

    Raises:
        ValueError: a length that 16 does not divide; an unknown dtype or order.

    >>> table = tile_choices(512, 64, fast_bytes=128 * 1024)
    >>> table[table.fits].traffic_bytes.min() < table.traffic_bytes.max()
    np.True_
    """
    import pandas as pd

    for name, known in ((dtype, ITEMSIZE), (order, ORDERS)):
        if name not in known:
            raise ValueError(f"unknown: {name!r}; known: {', '.join(known)}")
    itemsize, sides = ITEMSIZE[dtype], block_sizes(seqlen)
    capacity = fast_bytes // itemsize
    pairs = [Sizes(seqlen, seqlen, head_dim, r, c, causal) for r in sides for c in sides]
    whole = Sizes(seqlen, seqlen, head_dim, seqlen, seqlen, causal)
    compulsory = sum(closed_form("version2", "forward", whole)) * itemsize  # in a single tile
    textbook = min(
        (
            sum(closed_form("standard", "forward", sizes, capacity)) * itemsize
            for sizes in pairs
            if elements_needed("standard", "forward", sizes) <= capacity
        ),
        default=math.nan,
    )
    constant = LEAST_CONSTANT[order] * whole.band.visible_pairs() / seqlen**2
    rows = []
    for sizes in pairs:
        needed = elements_needed(order, "forward", sizes)
        read, written = (count * itemsize for count in closed_form(order, "forward", sizes))
        rows.append(
            {
                "block_q": sizes.block_q,
                "block_k": sizes.block_k,
                "fits": needed <= capacity,
                "needed_bytes": needed * itemsize,
                "read_bytes": read,
                "written_bytes": written,
                "traffic_bytes": read + written,
                "times_compulsory": (read + written) / compulsory,
                "times_textbook": (read + written) / textbook,
                "theorem_bytes": constant * theorem(sizes, needed) * itemsize,
            }
        )
    table = pd.DataFrame(rows)
    table.attrs["case"] = {
        "seqlen": seqlen, "head_dim": head_dim, "fast_bytes": fast_bytes, "dtype": dtype,
        "causal": causal, "order": order, "compulsory_bytes": compulsory,
        "textbook_bytes": textbook, "constant": LEAST_CONSTANT[order],
    }  # fmt: skip
    return table


def block_sizes(seqlen: int) -> list[int]:
    """The powers of two, from 16 to 1024, that divide a length.

    Raises:
        ValueError: 16 does not.
    """
    if seqlen < 1 or seqlen % SMALLEST_BLOCK:
        raise ValueError(f"seqlen must be a multiple of {SMALLEST_BLOCK}, got {seqlen}")
    return [1 << power for power in range(4, 11) if seqlen % (1 << power) == 0]


def best_choice(table: pd.DataFrame) -> tuple[int, int] | None:
    """The pair that fits and moves least; of equals the one that needs least. None: none fits."""
    fitting = table[table["fits"]]
    if fitting.empty:
        return None
    best = fitting.sort_values(["traffic_bytes", "needed_bytes"]).iloc[0]
    return int(best["block_q"]), int(best["block_k"])


def describe_choice(table: pd.DataFrame, block_q: int, block_k: int) -> str:
    """Describe a pair of the table in one sentence: its fit and its traffic.

    Raises:
        ValueError: the table has no such pair.
    """
    found = table[(table["block_q"] == block_q) & (table["block_k"] == block_k)]
    if found.empty:
        known = ", ".join(map(str, table["block_q"].unique()))
        raise ValueError(f"no blocks {block_q} and {block_k} in this table, only {known}")
    row = found.iloc[0]
    ratio = row["times_textbook"]
    pair = f"Br = {block_q}, Bc = {block_k}"
    size = f"{row['needed_bytes'] / 1024:,.0f} KiB"
    room = f"{table.attrs['case']['fast_bytes'] / 1024:,.0f}"
    if not row["fits"]:
        best = best_choice(table)
        advice = (
            f"Of those that fit, Br = {best[0]}, Bc = {best[1]} moves least."
            if best
            else f"No pair fits, not even {SMALLEST_BLOCK} x {SMALLEST_BLOCK}: "
            "use a smaller head dimension, a smaller dtype, or more fast memory."
        )
        return f"{pair} does not fit: it needs {size}, but there are only {room}. {advice}"
    against = "the textbook's tiles do not fit"
    if ratio == ratio:
        times, word = (1 / ratio, "less") if ratio <= 1 else (ratio, "more")
        against = f"{_times(times)} {word} than the textbook"
    return (
        f"{pair}: needs {size} of {room}, moves {format_bytes(row['traffic_bytes'])}, "
        f"{_times(row['times_compulsory'])} the least, {against}."
    )


def fast_memories() -> list[tuple[str, int]]:
    """Sizes of fast memory to choose from: (label, bytes), the smallest first.

    What one block of threads may have of a multiprocessor's shared memory, for the GPUs of
    data/hardware.csv: from compute capability 8.0 on 1 KiB of it is the system's.
    Source: CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    users: dict[int, list[str]] = {WITHOUT_ASKING_KIB: ["any GPU, by default"]}
    for spec in read_specs():
        reserved = 1 if float(spec.compute_capability) >= 8 else 0
        names = users.setdefault(int(spec.shared_kib_per_sm) - reserved, [])
        short = re.match(r"(RTX )?\S+( Ti)?", spec.name)
        names.append(short.group() if short else spec.name)
    return [
        (f"{kib} KiB ({', '.join(dict.fromkeys(users[kib]))})", kib * 1024) for kib in sorted(users)
    ]


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 9.95 else f"{ratio:.1f} times"
