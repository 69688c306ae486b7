# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Count what passes
#
# **Time** about 31 minutes (estimated). **You need** notebook 4, section 4.4.
# **Exercise** 4-2, 4 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [4, IO complexity](../../theory/04-io-complexity.md#theorem-2-with-its-constant).

# %%
import math

import numpy as np
import torch

from labsupport import analysis, checks
from labsupport.analysis.traffic import OutOfFastMemoryError, fitting_blocks
from labsupport.profiling import environment_card

torch.manual_seed(0)
environment_card()


# %% [markdown]
# Notebook 4 says that the traffic of FlashAttention is $N^2 d^2 / M$, and lets a program count it. Here you count it by
# hand, for three algorithms, and derive the law from your own formulas.
#
# The model: a *fast memory* of $M$ numbers, where all computing happens, and a *slow memory* for everything else. We
# count each number that moves between them.
#
# ![Version 1: a block of keys stays, the blocks of queries pass, and O, m and l are read and written each time. Version 2: a block of queries stays, the keys pass, and O is written once.](../../theory/figures/versions-orders.png)
#
# ## Exercise 4-2 · Count what passes
# ●●○ · useful · 28 minutes · 4 bonus points
#
# One head of `seqlen` queries and as many keys, forward; blocks divide `seqlen`. Count *numbers* (elements), not bytes.
#
# | function | returns |
# | --- | --- |
# | `textbook_traffic(seqlen, head_dim, block_q)` | `(read, written)` |
# | `tiled_traffic(seqlen, head_dim, block_q, block_k, *, outside, causal=False)` | `(read, written)` |
#
# **Textbook**: three kernels, no mask.
#
# 1. $S = QK^\top$: a block of `block_q` rows of $Q$ stays while all of $K$ passes; then the next block. $S$ is written.
# 2. Softmax: reads $S$ row by row (a row fits), and writes $P$.
# 3. $O = PV$: for each block of rows of $O$, its rows of $P$ pass once, and all of $V$ passes. $O$ is written.
#
# **Tiled**, `outside="queries"` (FlashAttention-2): for each block of queries, $Q$ is read once, $K$ and $V$ pass block by block,
# then $O$ and $L$ are written. $L$ has one number a row.
#
# **Tiled**, `outside="keys"` (FlashAttention's first version): first, zeros are written to $O$, $m$ and $\ell$. Then
# for each block of keys, $K$ and $V$ are read once; for each block of queries, $Q, O, m, \ell$ are read and
# $O, m, \ell$ written. $m$ and $\ell$ have one number a row.
#
# With `causal=True`, skip a tile without a visible pair: nothing moves for it.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Take 4 tokens with blocks of 2, and write down every load and store of one head, in order. What moves once for each
# block? What moves for each tile?
#
# <details><summary>Hint 2: the idea</summary>
#
# Count the tiles, then what moves for each. With a causal mask, block $r$ of the queries ends with row `(r + 1) * block_q - 1`, which
# sees `(r + 1) * block_q` keys: how many blocks of `block_k` is that, when the last one may be cut?
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# textbook    read     Q once, K once for each block of rows;  S;  P once, V once for each block of rows
#             written  S, P, O
# queries     read     Q once, and K and V of each tile           written   O and L once
# keys        read     K and V once, and Q, O, m, l of each tile  written   zeros first, then O, m, l of each tile
# causal      tiles    the sum over the blocks of queries of ceil(keys that its last row sees / block_k)
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-2-traffic", "locked": false, "schema_version": 3, "solution": true, "task": false}
def textbook_traffic(seqlen, head_dim, block_q):
    """(read, written) numbers of textbook attention, one head."""
    ### BEGIN SOLUTION
    square, matrix, passes = seqlen**2, seqlen * head_dim, seqlen // block_q
    read = (matrix + passes * matrix) + square + (square + passes * matrix)
    written = square + square + matrix
    return read, written
    ### END SOLUTION


def tiled_traffic(seqlen, head_dim, block_q, block_k, *, outside, causal=False):
    """(read, written) numbers of FlashAttention, one head; outside: "queries" or "keys"."""
    ### BEGIN SOLUTION
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
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-4-2-traffic-textbook", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_textbook_traffic(textbook_traffic)
### BEGIN HIDDEN TESTS
checks.check_textbook_traffic(textbook_traffic, seed=21)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-2-traffic-tiled", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_tiled_traffic(tiled_traffic)
### BEGIN HIDDEN TESTS
checks.check_tiled_traffic(tiled_traffic, seed=22)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-2-traffic-causal", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_tiled_causal(tiled_traffic)
### BEGIN HIDDEN TESTS
checks.check_tiled_causal(tiled_traffic, seed=23)
### END HIDDEN TESTS

# %% [markdown]
# Now test your formulas. `analysis.count` *runs* an algorithm on real numbers, in a memory that refuses more than $M$
# numbers at a time, and counts everything that is loaded or stored: the textbook, version 1 (keys outside) and
# version 2 (queries outside).

# %%
own_textbook = checks.solution_or_reference(
    textbook_traffic, checks.ex_4_2_traffic.textbook_traffic, checks.check_textbook_traffic
)
own_tiled = checks.solution_or_reference(
    tiled_traffic,
    checks.ex_4_2_traffic.tiled_traffic,
    checks.check_tiled_traffic,
    checks.check_tiled_causal,
)

# %% tags=["nbval-check-output"]
q1, k1, v1 = (torch.randn(128, 16, dtype=torch.float64) for _ in range(3))
outside = {"version1": "keys", "version2": "queries"}
print("              counted  formula    held, of 2,200")
for name in ("standard", "version1", "version2"):
    run = analysis.count(name, q1, k1, v1, block_q=16, block_k=32, capacity=2200)
    formula = (
        own_textbook(128, 16, 16)
        if name == "standard"
        else own_tiled(128, 16, 16, 32, outside=outside[name])
    )
    print(f"{name:10} {run.total:10,} {sum(formula):8,} {run.peak:9,}")

# %% [markdown]
# What if the tiles are larger than the memory?

# %% tags=["nbval-check-output"]
try:
    analysis.count("version2", q1, k1, v1, block_q=64, block_k=32, capacity=2200)
except OutOfFastMemoryError as error:
    print(error)

# %% [markdown]
# ## The law
#
# How does the traffic grow with the length, the head dimension, and the fast memory? **Predict first**: how much does it
# grow if `head_dim` doubles and everything else stays?

# %%
predicted_growth = None  # your guess: times as much traffic


# %% tags=["nbval-check-output"]
def accesses(version, seqlen, head_dim, capacity):
    """Numbers that pass, with the best blocks for this memory; what is left over is rounded up."""
    block_q, block_k = fitting_blocks(version, "forward", capacity, head_dim, power_of_two=True)
    return sum(own_tiled(seqlen, head_dim, block_q, block_k, outside=outside[version]))


def power(values, counts):
    return np.polyfit(np.log(values), np.log(counts), 1)[0]


lengths, dims = [2**i for i in (14, 15, 16)], [16, 32, 64]
memories = [2**i for i in range(14, 19)]
for version in outside:
    along_n = power(lengths, [accesses(version, n, 64, 2**17) for n in lengths])
    along_d = power(dims, [accesses(version, 2**18, d, 2**18) for d in dims])
    along_m = power(memories, [accesses(version, 2**20, 16, m) for m in memories])
    print(f"{version}: N to the power of {along_n:.2f}, d of {along_d:.2f}, M of {along_m:.2f}")

# %%
growth = accesses("version2", 2**18, 64, 2**18) / accesses("version2", 2**18, 32, 2**18)
checks.compare_prediction("Twice the head dimension", predicted_growth, growth, "times")

# %% [markdown]
# So the traffic is $N^2 d^2 / M$, theorem 2 of the FlashAttention paper. The powers are not whole numbers, because blocks
# are powers of two here, and because $Q$ and $O$ pass once for any tiles. Large heads gain least. Version 2 moves less
# than version 1 at the same $M$, each with its best blocks, because $O$ stays in fast memory until it is done. (In the counts above,
# blocks of 16 by 32 favoured version 1.) But this was not the main reason for version 2: that was enough programs
# (notebook 4, section 4.5).
#
# ## Tiles to play with
#
# Which tiles are best? Take one head of 4,096 tokens with $d = 64$ in bfloat16, and the shared memory of an H100's or
# H200's multiprocessor: 228 KiB, of which a single program may use 227. As in the papers, $B_r$ is `block_q` and $B_c$
# is `block_k`. **Predict first**: which $B_r$ and $B_c$ (powers of two) move least?

# %%
predicted_blocks = None  # your guess, (Br, Bc)

# %%
from labsupport import plotting
from labsupport.analysis.explorer import tile_explorer
from labsupport.analysis.tiles import best_choice, tile_choices

tiles = tile_choices(4096, 64, fast_bytes=228 * 1024)
best = best_choice(tiles)
guess = f"your guess was {predicted_blocks}" if predicted_blocks else "you made no prediction"
print(f"Least is moved by (Br, Bc) = {best}; {guess}.")
plotting.plot_tile_choices(tiles)

# %%
tile_explorer(seqlen=4096, head_dim=64)

# %% [markdown]
# The controls need a running notebook; the picture above is one setting of them. In this count, the block that stays
# ($B_r$ in version 2) should be as large as fits, and the other may be small. Real kernels use 64 or 128 by 64 or 128,
# for several reasons. The accumulator is in *registers*: 512 rows of 64 float32 numbers take half of a multiprocessor's
# registers. Tensor cores multiply at least 16 columns at a time, and need more to be busy. Several blocks of K and V
# must be loading at the same time. And a small number of large programs leaves multiprocessors idle. Traffic is only
# one cost, and with an L2 cache not the highest. So kernels are *tuned*:

# %% tags=["nbval-check-output"]
from labsupport.profiling import load_run

tuned = load_run("tune-forward-h200").query("seqlen == 4096 and head_dim == 64 and not causal")
columns = ["block_q", "block_k", "warps", "stages", "median_ms", "ratio"]
print(tuned.sort_values("median_ms")[columns].head(5).round(3).to_string(index=False))

# %% [markdown]
# These are the fastest of 27 tilings of the lab's plain Triton kernel on an H200. *warps* are groups of 32 threads of a
# program; *stages* is the number of blocks of K and V that are loaded ahead.
#
# ## The largest tensor
#
# You can ask one question of any program with a single call: which is the largest tensor that it makes?

# %%
from labsupport.attention import attention

q, k, v = (torch.randn(1, 1024, 4, 64) for _ in range(3))
for name in ("standard", "flash_torch", "sdpa_flash"):
    seen = analysis.trace_tensors(lambda name=name: attention(q, k, v, backend=name))
    print(f"{name:12} {seen.nbytes / 2**20:5.1f} MiB, shape {tuple(seen.shape)}")

# %% [markdown]
# For textbook attention it is $N \times N$ for each head. FlashAttention has nothing larger than its output, or than a
# tile of all heads (`flash_torch`, in plain PyTorch). No allocator or cache can distort this count, so the lab's tests
# use it.
