"""Exercise 1-2: the memory of N x N scores."""

from __future__ import annotations

import math
import random

from labsupport.checks.verdict import Student, judge_numbers, mistakes, passed


### BEGIN SOLUTION
def score_bytes(batch: int, heads: int, seqlen: int, bytes_per_element: int) -> int:
    """Return the bytes of S and P together."""
    return 2 * batch * heads * seqlen**2 * bytes_per_element


BYTE_MISTAKES = mistakes("""
That is one matrix; S and P exist at the same time, so count both.
    return 2 * -> return
That is the number of entries; multiply by the bytes of each.
    * bytes_per_element ->
The bytes of an element are an argument, bytes_per_element; you always count 2.
    * bytes_per_element -> * 2
The bytes of an element are an argument, bytes_per_element; you always count 4.
    * bytes_per_element -> * 4
Every head has its own matrices: multiply by heads.
    heads * ->
Every sequence of the batch has its own matrices: multiply by batch.
    batch * ->
S and P have seqlen x seqlen entries: the length counts twice.
    **2 * -> *
""")


def longest_that_fits(memory: int, batch: int, heads: int, bytes_per_element: int) -> int:
    """Return the longest sequence whose S and P fit into `memory` bytes."""
    return math.isqrt(memory // (2 * batch * heads * bytes_per_element))


LENGTH_MISTAKES = mistakes("""
That length fits S alone; S and P have to fit together.
    (2 * -> (
The memory grows with the square of the length: take a square root.
    math.isqrt -> int
A length is a whole number: round down (math.isqrt does).
    math.isqrt(memory // -> math.sqrt(memory /
""")
### END SOLUTION


def check_score_bytes(student: Student, seed: int = 0) -> None:
    """Exercise 1-2: bytes of the score matrices S and P."""
    rng = random.Random(seed)
    cases = [(1, 1, 1024, 4), (3, 12, 2048, 2), (1, 32, 65_536, 2)]
    for _ in range(3):
        cases.append((rng.randint(2, 9), rng.randint(2, 40), rng.randint(100, 9999), 4))
    judge_numbers(student, cases, score_bytes, BYTE_MISTAKES, ("bytes",))
    passed("bytes of S and P", seed)


def check_largest_length(student: Student, seed: int = 0) -> None:
    """Exercise 1-2: the longest sequence whose S and P fit into a memory."""
    rng = random.Random(seed)
    cases = [(8 * 2**30, 1, 12, 2), (2**34, 4, 32, 4), (1000, 1, 1, 4)]
    cases += [(rng.randint(10**6, 10**12), 2, rng.randint(2, 40), 2) for _ in range(3)]
    judge_numbers(student, cases, longest_that_fits, LENGTH_MISTAKES, ("length",))
    passed("longest sequence that fits", seed)
