# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 · Attention's memory bottleneck, and how FlashAttention removes it
#
# ![Memory of 32 layers in training, by formula: textbook attention outgrows an H200's 140 GiB at about 8,600 tokens, FlashAttention at about 140,000.](../theory/figures/memory-by-length.png)
#
# Textbook attention (black) outgrows every GPU. FlashAttention (blue) computes the same result exactly. Its memory
# grows with the length; the textbook's grows with the square of the length. In this notebook you write
# FlashAttention.
#
# **After this notebook you can**
#
# - write textbook attention, and say how much memory it needs;
# - explain why memory traffic, not arithmetic, makes it slow;
# - write FlashAttention: online softmax, tiled forward, and (*further*) the backward by recomputation;
# - call the fast implementations, know which *kernel* (a program that the device runs as a whole) was chosen, and
#   compare their time, memory and error;
# - (*further*) choose a dtype, and understand the errors that a wrong dtype causes.
#
# **Time** about 195 minutes; the exercises take 152 of them. Sections marked *further* are optional.
#
# - *In an afternoon*, 107 minutes: the core, sections 1.1 to 1.5 and 1.7 to 1.9, without the backward pass (1.6).
# - *In a little over half an hour*: section 1.4 with exercise 1-3, and step 1 of exercise 1-4.
#
# **You need** PyTorch (tensors, autograd, `matmul`), but no CUDA and no GPU: PyTorch has a FlashAttention kernel for
# CPUs, too. If you have a GPU, the cells use it, with more heads.
#
# **Further reading:** the theory chapters [1, Attention's memory
# bottleneck](../theory/01-memory-bottleneck.md), [2, Online softmax](../theory/02-online-softmax.md), [3, Forward and
# backward](../theory/03-forward-and-backward.md) and [6, Precision](../theory/06-precision.md). The
# [glossary](../theory/glossary.md) defines the terms.
#
# **How to work.** Run the cells in order. In seven exercises you replace `raise NotImplementedError` with your code.
# The check cells tell you what is still wrong, and hints unfold in stages. If your course hands out
# solutions, compare your code with them when your checks pass. Write down a guess before each measurement. *Run All* stops at the first unsolved exercise and then shows the end of the notebook:
# scroll up to the red message.

# %%
import math

import torch

from labsupport import checks, plotting
from labsupport.attention import attention, available_backends, last_call
from labsupport.profiling import environment_card

torch.manual_seed(0)
environment_card()

# %% [markdown]
# The card above names your device. It lists the implementations of attention, called *backends*: those that run here,
# and the reason why each of the others does not. `standard` is textbook attention, and runs on any device. So does
# `flash_torch`, FlashAttention in plain PyTorch. In a terminal, `labsupport doctor` says how to fix problems. It
# also warns if other programs keep the machine busy, which makes measured times too long.
#
# The following cell picks sizes that suit your device. `heads` and `head_dim` are those of a small model.

# %%
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
heads, head_dim = (16, 64) if device.type == "cuda" else (4, 64)
lengths = [512, 1024, 2048, 4096]

# %% [markdown]
# ## 1.1 · Attention, as the textbook writes it
# *Core · 18 minutes*
#
# For one head, with $N_q$ queries, $N_k$ keys and values, and head dimension $d$:
#
# $$
# S = \frac{Q K^\top}{\sqrt d} \in \mathbb{R}^{N_q \times N_k}, \qquad
# P = \operatorname{softmax}(S) \text{ row by row}, \qquad
# O = P V \in \mathbb{R}^{N_q \times d}
# $$
#
# Row $i$ of $P$ says how much query $i$ takes from each value. A *mask* hides some keys from some queries: a hidden
# key gets the weight 0. A language model hides the future with a *causal* mask.
#
# To hide a key, set its score $s$ to $-\infty$. Then its weight, $e^{s}/\sum e^{s}$, is 0. The next cell first tries
# a large negative number, and then $-\infty$.

# %%
scores = torch.zeros(2, 3, dtype=torch.float16)
mask = torch.tensor([[True, False, True], [False, False, False]])  # query 1 may look nowhere

try:
    scores.masked_fill(~mask, -1e9)
except RuntimeError as error:
    print("-1e9 in float16:", error)

print("-inf, then softmax:", scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).tolist())
plotting.plot_weights({"this mask (dark: visible)": mask, "causal": torch.ones(6, 6).tril()})


# %% [markdown]
# The number $-10^9$ does not fit into float16, whose largest value is 65,504. With $-\infty$, a row whose keys are
# all hidden becomes $0/0$ = NaN. Padding in a batch makes such rows. FlashAttention and PyTorch's
# `scaled_dot_product_attention` (SDPA) *define* the output of such a row as 0, and so will you.

# %% [markdown]
# ### Exercise 1-1 · Textbook attention with a mask
# ●○○ · 15 minutes · 4 points
#
# | | shape | |
# | --- | --- | --- |
# | `q` | `(..., seqlen_q, head_dim)` | queries |
# | `k`, `v` | `(..., seqlen_k, head_dim)` | keys and values |
# | `mask` | `(seqlen_q, seqlen_k)`, boolean, or `None` | `True` where a query may look |
# | returns `output` | `(..., seqlen_q, head_dim)` | in the dtype of `q` |
# | returns `weights` | `(..., seqlen_q, seqlen_k)` | in the dtype of `q`; rows sum to 1, or to 0 if the query sees no key |
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which dimension of the scores belongs to the keys? Which score gives a weight of exactly 0?
#
# <details><summary>Hint 2: the idea</summary>
#
# `k.mT` transposes the last two dimensions. `masked_fill` returns a copy with some entries replaced. The head
# dimension is `q.shape[-1]`, which may differ from this notebook's `head_dim`.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# scores = q times k transposed, divided by the square root of q's last dimension
# if there is a mask: scores become -inf where it is False
# weights = softmax of each row of scores
# if there is a mask: where a row of it is all False, that row of weights becomes 0
# ```
#
# `mask.any(dim=-1, keepdim=True)` says which queries see anything.
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-1-textbook-attention", "locked": false, "schema_version": 3, "solution": true, "task": false}
def textbook_attention(q, k, v, mask=None):
    """Attention with the whole score matrix in memory; returns (output, weights)."""
    ### BEGIN SOLUTION
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if mask is not None:
        weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)
    return weights @ v, weights
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-1-textbook-attention-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_textbook_values(textbook_attention)
### BEGIN HIDDEN TESTS
checks.check_textbook_values(textbook_attention, seed=11)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-1-textbook-attention-mask", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_textbook_mask(textbook_attention)
### BEGIN HIDDEN TESTS
checks.check_textbook_mask(textbook_attention, seed=12)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-1-textbook-attention-empty-rows", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_textbook_empty_rows(textbook_attention)
### BEGIN HIDDEN TESTS
checks.check_textbook_empty_rows(textbook_attention, seed=13)
### END HIDDEN TESTS

# %% [markdown]
# With the identity matrix as values, the output *is* the weights. Each row is a query, each column a key, and dark means a
# large weight.

# %%
from labsupport.attention import standard_attention

own_attention = checks.solution_or_reference(
    textbook_attention, standard_attention, checks.check_textbook_values
)
all_pairs = torch.ones(12, 12, dtype=torch.bool)
x, identity = 0.4 * torch.randn(12, head_dim), torch.eye(12, head_dim)
masks = {"no mask": None, "causal": all_pairs.tril(), "6 or more back": all_pairs.tril(-6)}
plotting.plot_weights(
    {name: own_attention(x, x, identity, mask)[0][:, :12] for name, mask in masks.items()}
)


# %% [markdown]
# Here queries and keys are the same vectors, so each token attends most to itself, unless the mask hides it. In the
# last picture the first six queries see nothing, so their rows are 0.

# %% [markdown]
# ## 1.2 · What it costs: N × N
# *Core · 8 minutes*
#
# Textbook attention stores $S$ and $P$ at the same time. Each has `seqlen` × `seqlen` entries for every head and
# every sequence of the batch.
#
# ### Exercise 1-2 · The memory of N × N
# ●○○ · 5 minutes · 3 points
#
# Write two formulas.
#
# | | returns |
# | --- | --- |
# | `score_bytes(batch, heads, seqlen, bytes_per_element)` | the bytes of $S$ and $P$ together, an integer |
# | `longest_that_fits(memory, batch, heads, bytes_per_element)` | the length of the longest sequence whose $S$ and $P$ fit into `memory` bytes; both are integers |
#
# <details><summary>Hint 1: a nudge</summary>
#
# How many entries has one matrix? How many such matrices exist at the same time, over all heads and sequences?
#
# <details><summary>Hint 2: the idea</summary>
#
# Solve the first formula for `seqlen`, and round down.
#
# <details><summary>Hint 3: an outline</summary>
#
# Divide `memory` by everything but `seqlen` squared, with `//`. `math.isqrt(n)` is the square root of an integer, rounded down;
# `n ** 0.5` is a float, and goes wrong for large numbers.
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-2-score-memory", "locked": false, "schema_version": 3, "solution": true, "task": false}
def score_bytes(batch, heads, seqlen, bytes_per_element):
    """Bytes of S and P together."""
    ### BEGIN SOLUTION
    return 2 * batch * heads * seqlen**2 * bytes_per_element
    ### END SOLUTION


def longest_that_fits(memory, batch, heads, bytes_per_element):
    """Longest sequence whose S and P fit into `memory` bytes."""
    ### BEGIN SOLUTION
    return math.isqrt(memory // (2 * batch * heads * bytes_per_element))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-2-score-memory-bytes", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_score_bytes(score_bytes)
### BEGIN HIDDEN TESTS
checks.check_score_bytes(score_bytes, seed=21)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-2-score-memory-length", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_largest_length(longest_that_fits)
### BEGIN HIDDEN TESTS
checks.check_largest_length(longest_that_fits, seed=22)
### END HIDDEN TESTS

# %% [markdown]
# Now measure. `measure_peak_memory` counts the bytes that a call allocates at its peak, beyond those allocated before. Guess:
# how many MiB does textbook attention need at 4,096 tokens on your device?

# %%
predicted_mib = None  # your guess, a number, before you run the next cells

# %%
import pandas as pd

from labsupport.profiling import measure_peak_memory
from labsupport.profiling.provenance import provenance


def measured_bytes(seqlen):
    q, k, v = torch.randn(3, 1, heads, seqlen, head_dim, device=device)
    return measure_peak_memory(lambda: own_attention(q, k, v)).peak_bytes


# %%
memory = pd.DataFrame({"seqlen": lengths, "backend": "standard"})
memory = memory.assign(direction="forward", status="ok")
memory.attrs["provenance"] = provenance(device)
memory["peak_memory_bytes"] = [measured_bytes(n) for n in lengths]
most = memory.peak_memory_bytes.iloc[-1] / 2**20
checks.compare_prediction("Memory at 4,096 tokens", predicted_mib, most, "MiB")
formula = plotting.Reference("S and P by formula", lambda n: 2 * heads * n**2 * 4 / 2**20)
plotting.plot_memory(
    memory,
    title=f"At 4,096 tokens the textbook needs {most:,.0f} MiB",
    references=[formula],
)

# %% [markdown]
# Twice the length takes four times the memory, as the formula says. The measured values are a little larger, because
# they include the output.
#
# <details><summary>Does <em>your</em> function need about 1.5 times the formula? Which third matrix is alive at the same time?</summary>
#
# The scores before they were scaled or masked. While a name (`scores`, say) refers to the old matrix, it stays in memory.
# </details>
#
# Now apply the formula to a model with 32 heads in float16, and one sequence.

# %% tags=["nbval-check-output"]
for seqlen in (4096, 16_384, 65_536, 131_072):
    gib = 2 * 32 * seqlen**2 * 2 / 2**30
    print(f"{seqlen:>7,} tokens: {gib:8,.0f} GiB for S and P of one layer")

# %% [markdown]
# No GPU has 2,048 GiB. And training stores $P$ of *every layer* for the backward pass.

# %% [markdown]
# ## 1.3 · Memory is slow, arithmetic is fast
# *Core · 6 minutes*
#
# Big matrices also cost time. A processor computes with numbers in a small, fast memory next to its arithmetic units:
# SRAM, which is a GPU's shared memory or a CPU's caches. The large memory is far away and slow: HBM on a data-centre
# GPU, DRAM in a laptop. Some GPUs in numbers:

# %%
from labsupport.profiling import hardware_table, measured_ceilings

gpus = hardware_table().set_index("name")
pd.DataFrame(
    {
        "SRAM in all, MiB": (gpus.shared_kib_per_sm * gpus.sms / 1024).round(1),
        "memory, GiB": gpus.memory_gib,
        "memory bandwidth, GB/s": gpus.bandwidth_gb_s,
        "bfloat16, TFLOP/s": gpus.bf16_tflops,
    }
)

# %% [markdown]
# These are specifications, from `data/hardware.csv`, where each row names its source. (Older GPUs have no bfloat16.)
# The memory is about 2,000 to 6,600 times as large as all SRAM together. A GPU consists of many *multiprocessors*, and
# each has only its own part of the SRAM. Compare that part with the scores of one head:

# %% tags=["nbval-check-output"]
print(f"SRAM of one multiprocessor: up to {gpus.shared_kib_per_sm.max():.0f} KiB")
print(f"scores of one head, 4,096 tokens, float16: {4096**2 * 2 / 1024:,.0f} KiB")

# %% [markdown]
# The scores do not fit. So textbook attention moves $S$ and $P$ through the slow memory, at least four times:
#
# | step | reads | writes |
# | --- | --- | --- |
# | $S = QK^\top$ | $Q, K$ | $S$ |
# | $P = \operatorname{softmax}(S)$ | $S$ | $P$ |
# | $O = PV$ | $P, V$ | $O$ |
#
# ![Textbook attention as four kernels, which pass S and P to one another through the slow memory; beside it FlashAttention, one kernel that reads Q, K and V and writes O.](../theory/figures/textbook-passes.png)
#
# PyTorch makes more trips: its scaling is a kernel of its own, and so is a mask. Each reads and writes the whole matrix
# once more.
#
# Two things take time in a forward pass. Bytes move at the speed of the memory. The arithmetic, $4N^2d$
# floating-point operations (FLOPs) per head, runs at the speed of matrix multiplication. The pass takes at least as
# long as the slower of the two. The next cells *measure* both speeds on your device, and take the H200's from the
# table. Guess: on the H200, how many times as long as the arithmetic does
# moving the bytes take?

# %%
predicted_ratio = None  # H200: how many times as long do the bytes take as the arithmetic?

# %%
ceilings = measured_ceilings(device)
print(ceilings)

# %%
half = torch.cuda.is_available() and "bfloat16" in ceilings.matmul_tflops
yours = ("bfloat16", 2) if half else ("float32", 4)
devices = {
    f"your device, {yours[0]}": (ceilings.matmul_tflops[yours[0]], ceilings.copy_gb_s, yours[1]),
    "H200, bfloat16": (gpus.bf16_tflops["H200"], gpus.bandwidth_gb_s["H200"], 2),
}
bounds = pd.DataFrame(index=devices)
tokens = 4096
for name, (tflops, gb_s, itemsize) in devices.items():
    moved = 4 * tokens**2 * itemsize  # S and P of one head, read and written
    inputs = 4 * tokens * head_dim * itemsize  # Q, K, V and O, once
    bounds.loc[name, "arithmetic, ms"] = 4 * tokens**2 * head_dim / tflops / 1e9
    bounds.loc[name, "textbook's bytes, ms"] = (moved + inputs) / gb_s / 1e6
    bounds.loc[name, "fewest bytes, ms"] = inputs / gb_s / 1e6
bounds.round(4)

# %% tags=["nbval-check-output"]
h200 = bounds.loc["H200, bfloat16"]
ratio = h200["textbook's bytes, ms"] / h200["arithmetic, ms"]
checks.compare_prediction("Bytes over arithmetic, H200", predicted_ratio, ratio, "times")

# %% [markdown]
# $S$ and $P$ are each written once and read once: $4N^2$ numbers move. Q, K, V and O each move once: $4Nd$ numbers,
# `seqlen / head_dim` = 64 times fewer.
# On the H200 the textbook's bytes take 6.5 times as long as the arithmetic, so the GPU's arithmetic units would wait most of
# the time.
#
# On a CPU the arithmetic is slow as well, and often takes longer than the bytes. Textbook attention takes far longer
# than both (section 1.8), because it makes more than four trips and allocates memory for each matrix. (Many CPUs have
# no fast instructions for float16, so it may be many times slower than float32.)

# %% [markdown]
# ![Speed against FLOPs per byte on an H200: the textbook's speed is limited by the memory (sloping line), the speed of FlashAttention's kernels by the arithmetic (flat line).](../theory/figures/roofline-h200.png)
#
# So the aim is fewer trips to the slow memory, not fewer operations: **never write $S$ and $P$ there**. Compute a small tile
# of them in fast memory, use it, and discard it. Three ideas make that possible:
#
# 1. *Tiling*: cut $Q$, $K$, $V$ into blocks, so that a tile of $S$ fits on the chip.
# 2. *Online softmax*: normalise a row without having seen all of it.
# 3. *Recomputation*: in the backward pass compute the tiles again, instead of storing them.
#
# *Fusion* then puts all steps into one *kernel*, a program that the device runs as a whole. So each tile stays on the
# chip from the first multiplication to the last.
#
# > **A common error.** "FlashAttention's memory accesses are $O(N)$." Its extra *memory* is $O(N)$. Its accesses are
# > $\Theta(N^2 d^2 / M)$ for an on-chip memory of $M$ elements, against $\Theta(Nd + N^2)$ for the textbook (Dao et
# > al. 2022, theorem 2). That is less by a factor of about $M/d^2$, but still quadratic in $N$.

# %% [markdown]
# ## 1.4 · The obstacle: softmax wants the whole row
# *Core · 23 minutes*
#
# To normalise a row you need the sum over all its entries. You also need its largest entry: $e^{s}$ overflows for
# large $s$, so the largest entry is subtracted first.

# %% tags=["nbval-check-output"]
row = torch.tensor([998.0, 1000.0, 999.0, 1001.0])
shifted = row - row.max()
for name, s in (("as it stands", row), ("maximum subtracted", shifted)):
    print(f"{name:20}", [f"{p:.4f}" for p in s.exp() / s.exp().sum()])

# %% [markdown]
# A common mistake is to take the softmax of each block and add up the results. The result is wrong, and
# not just by rounding:

# %% tags=["nbval-check-output"]
values = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
right = row.softmax(0) @ values
blocks = sum(s.softmax(0) @ w for s, w in zip(row.split(2), values.split(2), strict=True))
print(f"right {right.item():.4f}, block softmaxes added up {blocks.item():.4f}")


# %% [markdown]
# Each block was normalised to 1, so the blocks lost their relative weight. Instead, divide only at the end. Until
# then, carry two numbers for each row:
#
# - $m$, the largest score seen so far, and
# - $\ell = \sum e^{s - m}$ over the scores seen so far.
#
# For example, a row has the eight scores 2, 1, 4, 3, 1, 0, 5, 2, and we see two at a time.
#
# | block | $m$ before → after | the old $\ell$ shrinks | the block adds | $\ell$ |
# | --- | --- | --- | --- | --- |
# | 2, 1 | −∞ → 2 | 0 | $e^{0} + e^{-1}$ = 1.368 | 1.368 |
# | 4, 3 | 2 → 4 | 1.368 · $e^{2-4}$ = 0.185 | $e^{0} + e^{-1}$ = 1.368 | 1.553 |
# | 1, 0 | 4 → 4 | 1.553 · $e^{0}$ = 1.553 | $e^{-3} + e^{-4}$ = 0.068 | 1.621 |
# | 5, 2 | 4 → 5 | 1.621 · $e^{4-5}$ = 0.596 | $e^{0} + e^{-3}$ = 1.050 | **1.646** |
#
# ![The eight scores with the running maximum above, and below the running sum, which shrinks when the maximum rises.](../theory/figures/running-max-and-sum.png)
#
# Check, on paper or in a cell, that 1.646 is the sum over the whole row, relative to its maximum 5.
#
# A new block with scores $s'$ may raise the maximum from $m$ to $m'$. The sum so far is relative to the old maximum, so it is
# too large by a factor of exactly $e^{m' - m}$. One multiplication corrects it:
#
# $$
# m' = \max\bigl(m, \max_j s'_j\bigr), \qquad
# \ell' = e^{m - m'}\,\ell + \sum_j e^{s'_j - m'}
# $$
#
# This is exact, because $e^{m-m'} \sum e^{s-m} = \sum e^{s-m'}$.

# %% [markdown]
# ### Exercise 1-3 · The running maximum and sum
# ●●○ · 20 minutes · 4 points
#
# | | shape | |
# | --- | --- | --- |
# | `scores` | `(..., cols)` | rows of scores; `-inf` hides an entry |
# | `block_size` | integer | look at this many columns at a time; the last block may be shorter |
# | returns `m` | `(...)` | the largest entry of each row |
# | returns `l` | `(...)` | the sum of `exp(score - m)` of each row |
#
# A row that is `-inf` throughout keeps `m = -inf` and `l = 0`.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Each row of the table above is one turn of your loop. Which of the two numbers must be updated first?
#
# <details><summary>Hint 2: the idea</summary>
#
# `scores.split(block_size, dim=-1)` cuts the blocks. Start with `m` full of `-inf` and `l` full of 0. Find the new maximum first,
# then use it to correct the old `l`, then add the block's sum.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# for each block:
#     m_new = the larger one of m and the block's maximum
#     l = l * exp(m - m_new) + the sum of exp(block - m_new)
#     m = m_new
# ```
#
# If `m` and `m_new` are both `-inf`, `m - m_new` is NaN. So where `m_new` is `-inf`, subtract 0 instead (use
# `masked_fill`).
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-3-online-softmax", "locked": false, "schema_version": 3, "solution": true, "task": false}
def running_max_and_sum(scores, block_size):
    """The softmax statistics (m, l) of each row, seen one block at a time."""
    ### BEGIN SOLUTION
    m = torch.full(scores.shape[:-1], -torch.inf, dtype=scores.dtype, device=scores.device)
    l = torch.zeros_like(m)
    for block in scores.split(block_size, dim=-1):
        m_new = torch.maximum(m, block.amax(-1))
        shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
        l = l * (m - shift).exp() + (block - shift[..., None]).exp().sum(-1)
        m = m_new
    return m, l
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-3-online-softmax-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_running_values(running_max_and_sum)
### BEGIN HIDDEN TESTS
checks.check_running_values(running_max_and_sum, seed=31)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-3-online-softmax-extremes", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_running_extremes(running_max_and_sum)
### BEGIN HIDDEN TESTS
checks.check_running_extremes(running_max_and_sum, seed=31)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-3-online-softmax-streams", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_running_streams(running_max_and_sum)

# %% [markdown]
# You can merge blocks in any order, and get the same pair:
#
# ![Two trees of merges for the eight scores, a chain and a balanced tree: both end in m = 5 and a sum of 1.646.](../theory/figures/merge-orders.png)
#
# The pair $(m, \ell)$ is often stored as one number, the *log-sum-exp* $L = m + \ln \ell = \ln \sum e^{s}$. Take two
# results of attention over *different keys*, with log-sum-exps $L_a$ and $L_b$. You can merge the two: add them with
# weights $e^{L_a - L}$ and $e^{L_b - L}$, where $L = \ln(e^{L_a} + e^{L_b})$. Ring attention and split-KV decoding,
# in later notebooks, use this.

# %% tags=["nbval-check-output"]
from labsupport.attention import oracle_attention

q, k, v = (torch.randn(6, 8, dtype=torch.float64) for _ in range(3))
# exact attention, in float64: returns the output and L
out_a, lse_a = oracle_attention(q, k[:4], v[:4])
out_b, lse_b = oracle_attention(q, k[4:], v[4:])
lse = torch.logaddexp(lse_a, lse_b)  # ln(exp(lse_a) + exp(lse_b))
merged = (lse_a - lse).exp()[:, None] * out_a + (lse_b - lse).exp()[:, None] * out_b
whole, _ = oracle_attention(q, k, v)
print("merged halves = whole:", torch.allclose(merged, whole))
print("plain average = whole:", torch.allclose((out_a + out_b) / 2, whole))


# %% [markdown]
# ## 1.5 · FlashAttention, forward
# *Core · 43 minutes*
#
# Now combine tiling and online softmax. Cut $Q$ into blocks of $B_r$ rows, and $K$ and $V$ into blocks of $B_c$ rows.
# For each block of $Q$, go through the blocks of $K$ and $V$, and carry $m$, $\ell$ and the *unnormalised* output $O$
# along. $O$ is a sum of $e^{s-m} v$, so you correct it exactly like $\ell$. With $S_{ij}$ for the tile of scores of
# block $i$ of $Q$ and block $j$ of $K$:
#
# $$
# O' = e^{m - m'}\, O + e^{S_{ij} - m'}\, V_j
# \qquad\text{and after the last block}\qquad
# O \leftarrow O / \ell, \quad L = m + \ln \ell .
# $$
#
# ![Left, the forward pass: one block of queries meets all blocks of keys, row by row. Right, the backward pass: one block of keys meets all blocks of queries.](../theory/figures/loop-order.png)
#
# The left half of the drawing is the forward pass: one *worker* takes one block of $Q$, and keeps $m$, $\ell$ and $O$
# of that block. (This is version 2 of the algorithm. In version 1 the outer loop ran over $K$ and $V$.)

# %% [markdown]
# ### Exercise 1-4 · The tiled forward, in three steps
# ●●● · 40 minutes · 7 points
#
# In each step you extend the same function. Then run its cell and the checks of that step again.
#
# | | shape | |
# | --- | --- | --- |
# | `q` | `(..., seqlen_q, head_dim)` | queries |
# | `k`, `v` | `(..., seqlen_k, head_dim)` | keys and values |
# | `is_causal` | bool | step 3: if true, query `i` sees keys up to `i + seqlen_k - seqlen_q` |
# | `block_q`, `block_k` | integers | rows and columns of a tile; the last tile may be smaller |
# | returns `out` | `(..., seqlen_q, head_dim)` | |
# | returns `lse` | `(..., seqlen_q)` | $L$, natural logarithm; `-inf` for a query that sees no key |
#
# Create no tensor of `seqlen_q` × `seqlen_k`, not even a mask. A query that sees no key gets output 0.
#
# #### Step 1 · One block of rows · 15 minutes, 3 points
#
# Treat all queries as one block, and ignore `block_q` and `is_causal`. Go through the blocks of keys and values, and carry
# $m$, $\ell$ and $O$: exercise 1-3 with one more line.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which three things does the worker carry from tile to tile, and which of them must be corrected when the maximum rises?
#
# <details><summary>Hint 2: the idea</summary>
#
# `x[..., cols, :]`, with `cols` a slice, takes a block out of a tensor with any leading dimensions. $m$ and $\ell$
# have one number for each query, while a tile and $O$ have one row. To combine the two kinds, write `m[..., None]`.
# Divide by $\ell$ once, after the last block.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# m = -inf, l = 0: one number for each query; o = 0: one row for each query
# for j = 0, block_k, 2 * block_k, ...:
#     cols = the slice from j to j + block_k, but not beyond seqlen_k
#     s = the tile of scores: q times the block of k transposed, times scale
#     m_new = the larger one of m and the tile's row maximum
#     p = exp(s - m_new), alpha = exp(m - m_new)
#     l and o, each times alpha, plus the tile's part
#     m = m_new
# return o divided by l, and m + log(l)
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-4-tiled-forward", "locked": false, "schema_version": 3, "solution": true, "task": false}
def my_flash_forward(q, k, v, is_causal, block_q, block_k):
    """FlashAttention's forward pass; returns (out, lse)."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1])
    ### BEGIN SOLUTION
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.shape[:-1])
    for i in range(0, seqlen_q, block_q):
        rows = slice(i, min(i + block_q, seqlen_q))
        m = q.new_full(q[..., rows, 0].shape, -torch.inf)
        l = torch.zeros_like(m)
        o = torch.zeros_like(q[..., rows, :])
        for j in range(0, seqlen_k, block_k):
            cols = slice(j, min(j + block_k, seqlen_k))
            s = q[..., rows, :] @ k[..., cols, :].mT * scale
            if is_causal:
                query = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                key = torch.arange(cols.start, cols.stop, device=q.device)
                s = s.masked_fill(key > query + seqlen_k - seqlen_q, -torch.inf)
            m_new = torch.maximum(m, s.amax(dim=-1))
            shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p = torch.exp(s - shift[..., None])
            alpha = torch.exp(m - shift)
            l = l * alpha + p.sum(dim=-1)
            o = o * alpha[..., None] + p @ v[..., cols, :]
            m = m_new
        out[..., rows, :] = o / l.masked_fill(l == 0, 1.0)[..., None]
        lse[..., rows] = m + torch.log(l)
    return out, lse
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-4-tiled-forward-rows", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_forward_rows(my_flash_forward)
### BEGIN HIDDEN TESTS
checks.check_forward_rows(my_flash_forward, seed=44)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-4-tiled-forward-lse", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_forward_lse(my_flash_forward)
### BEGIN HIDDEN TESTS
checks.check_forward_lse(my_flash_forward, seed=42)
### END HIDDEN TESTS

# %% [markdown]
# #### Step 2 · All rows · 10 minutes, 1 point
#
# Put an outer loop over blocks of `block_q` queries around your loop. Each block starts with fresh $m$, $\ell$ and $O$, and
# stores its rows of `out` and `lse` when its inner loop ends.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which of your lines must run once for each block of queries, and which only once?
#
# <details><summary>Hint 2: the idea</summary>
#
# Make `out` and `lse` first, and write one block of rows into them at a time. The last block may be shorter.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# make out and lse, one row (one number) for each query
# for i = 0, block_q, 2 * block_q, ...:
#     rows = the slice from i to i + block_q, but not beyond seqlen_q
#     all of step 1, with q[..., rows, :] in place of q
#     store the results in out[..., rows, :] and lse[..., rows]
# ```
# </details></details></details>

# %% nbgrader={"grade": true, "grade_id": "ex-1-4-tiled-forward-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_forward_values(my_flash_forward)
### BEGIN HIDDEN TESTS
checks.check_forward_values(my_flash_forward, seed=41)
### END HIDDEN TESTS

# %% [markdown]
# #### Step 3 · A causal mask · 15 minutes, 3 points
#
# "Lower triangle" is clear only if there are as many queries as keys. During generation there is one new query and a
# long cache of keys. That query is the *last* token, so it must see all keys. Therefore flash-attn (version 2.1 and
# later) and this lab align the mask at the bottom right. PyTorch's `is_causal=True` aligns it at the top left:

# %% tags=["nbval-check-output"]
ones = torch.ones(2, 5, dtype=torch.bool)
print("top-left (SDPA's is_causal)     ", ones.tril().int().tolist())
print("bottom-right (flash-attn, here) ", ones.tril(diagonal=5 - 2).int().tolist())

# %% [markdown]
# With more keys than queries, the diagonal runs through the tiles like this:

# %%
plotting.plot_tiles(seqlen_q=48, seqlen_k=64, block_q=8, block_k=8)

# %% [markdown]
# You can skip tiles above the diagonal, and only tiles on the diagonal need a mask. (You may also compute and mask
# every tile.) Add the mask to your function, tile by tile. If `seqlen_q` is larger than `seqlen_k`, some rows see no
# key.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Where in the whole sequence are the rows and columns of this tile?
#
# <details><summary>Hint 2: the idea</summary>
#
# Compare positions: with `i` the row numbers in the whole sequence (a column vector) and `j` the column numbers,
# `j <= i + seqlen_k - seqlen_q` is the tile of the mask. `torch.arange(start, stop)` counts them. Hidden scores are `-inf`.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# if is_causal: in the tile, scores become -inf where j > i + seqlen_k - seqlen_q
# m_new may still be -inf: subtract 0 there, so that exp gives 0 and not NaN
# l may still be 0 at the end: divide by 1 there; m + log(l) is then -inf, as required
# ```
# </details></details></details>

# %% nbgrader={"grade": true, "grade_id": "ex-1-4-tiled-forward-edges", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_forward_edges(my_flash_forward)
### BEGIN HIDDEN TESTS
checks.check_forward_edges(my_flash_forward, seed=43)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-4-tiled-forward-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_forward_memory(my_flash_forward)

# %% [markdown]
# You have written FlashAttention's forward pass. A GPU kernel runs the same algorithm, but keeps the tile, $m$,
# $\ell$ and $O$ in on-chip memory through the inner loop, and runs many blocks of $Q$ in parallel. In PyTorch, each
# of your lines is a separate kernel that reads and writes main memory.
#
# `register_backend` gives your function the name `"mine"`: from now on the lab's tables and charts can use it. Its
# blocks are larger than in your checks, so that the loop has fewer turns:

# %%
from labsupport.attention import register_backend
from labsupport.attention.flash_torch import flash_attention_forward

forward = checks.solution_or_reference(
    my_flash_forward,
    lambda q, k, v, c, bq, bk: flash_attention_forward(q, k, v, c, block_q=bq, block_k=bk),
    checks.check_forward_values,
    checks.check_forward_edges,
)
mine_trains = False  # until you have written the backward pass, too
if forward is my_flash_forward:
    register_backend("mine", lambda q, k, v, causal: forward(q, k, v, causal, 256, 256)[0])
else:
    print("Your own line in the charts of section 1.8 waits for exercise 1-4.")


# %% [markdown]
# ## 1.6 · FlashAttention, backward
# *Further (optional) · 49 minutes*
#
# The backward pass needs $P$ again. The textbook stores it in the forward pass. FlashAttention stores only $L$, one
# number for each row, and computes each tile of $P$ from it: $P_{ij} = e^{S_{ij} - L_i}$. With the gradient $dO$ of
# the output, and $\circ$ for the product entry by entry:
#
# $$
# dV = P^\top dO, \qquad dP = dO\, V^\top, \qquad
# dS = P \circ (dP - D), \qquad dQ = \tfrac{1}{\sqrt d}\, dS\, K, \qquad dK = \tfrac{1}{\sqrt d}\, dS^\top Q
# $$
#
# $D$ comes from the derivative of a softmax row, $ds_j = p_j \bigl(dp_j - \sum_k p_k\, dp_k\bigr)$. So $D$ is a
# column, one number for each query: $D_i = \sum_k P_{ik}\, dP_{ik}$. This sum runs over a whole row, but a tile has
# only a part of the row. In step 2 you find a way to compute $D$ without the row.
#
# The right half of the drawing in section 1.5 is the loop: one worker keeps $dK$ and $dV$ of one block of keys, and
# all workers add to $dQ$.
#
# > **A common error.** "The backward costs twice the forward." It does five matrix products ($QK^\top$ again, and four above), the
# > forward does two: 2.5 times the FLOPs.
#
# ![Matrix products of a training step, and measured times on an H200: FlashAttention does seven products instead of six, and is still several times as fast.](../theory/figures/products-and-time.png)

# %% [markdown]
# ### Exercise 1-5 · The backward, by recomputation, in three steps
# ●●● · 45 minutes · 6 points
#
# Again you extend one function in three steps. In step 2 you also write a small second function.
#
# | `my_flash_backward` | shape | |
# | --- | --- | --- |
# | `dout`, `out` | `(..., seqlen_q, head_dim)` | gradient of the output, and the output |
# | `lse` | `(..., seqlen_q)` | from the forward pass |
# | returns `dq`, `dk`, `dv` | as `q`, `k`, `v` | |
#
# The other arguments are those of exercise 1-4. Again, create no tensor of `seqlen_q` × `seqlen_k`. A
# query that sees no key (`lse` is `-inf`) contributes nothing.
#
# #### Step 1 · P again, and dV · 15 minutes, 1 point
#
# Without a mask: go through the tiles, compute $P$ of each from `lse`, and add up `dv`. Return zeros for `dq` and `dk`.
#
# <details><summary>Hint 1: a nudge</summary>
#
# The forward pass needed a running maximum and sum. Why does this pass need neither?
#
# <details><summary>Hint 2: the idea</summary>
#
# Let the outer loop run over the blocks of keys, as version 2's backward does: then `dv` of a block is finished when
# its inner loop ends. A tile of $P$ is $e^{S - L}$. Write `lse[..., None]` for $L$: one row for each query,
# like the tile.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# dq, dk, dv = zeros like q, k, v
# for each block of keys, cols:
#     for each block of queries, rows:
#         s = the tile of scores, as in exercise 1-4
#         p = exp(s - lse of these rows)
#         dv of cols += p transposed times dout of rows
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-5-backward", "locked": false, "schema_version": 3, "solution": true, "task": false}
def my_flash_backward(dout, q, k, v, out, lse, is_causal, block_q, block_k):
    """FlashAttention's backward pass; returns (dq, dk, dv)."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    scale = 1 / math.sqrt(q.shape[-1])
    ### BEGIN SOLUTION
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (dout * out).sum(dim=-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    for j in range(0, seqlen_k, block_k):
        cols = slice(j, min(j + block_k, seqlen_k))
        for i in range(0, seqlen_q, block_q):
            rows = slice(i, min(i + block_q, seqlen_q))
            s = q[..., rows, :] @ k[..., cols, :].mT * scale
            if is_causal:
                query = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                key = torch.arange(cols.start, cols.stop, device=q.device)
                s = s.masked_fill(key > query + seqlen_k - seqlen_q, -torch.inf)
            p = torch.exp(s - lse[..., rows, None])
            dv[..., cols, :] += p.mT @ dout[..., rows, :]
            dp = dout[..., rows, :] @ v[..., cols, :].mT
            ds = p * (dp - delta[..., rows, None])
            dq[..., rows, :] += ds @ k[..., cols, :] * scale
            dk[..., cols, :] += ds.mT @ q[..., rows, :] * scale
    return dq, dk, dv
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-5-backward-dv", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_backward_dv(my_flash_backward)
### BEGIN HIDDEN TESTS
checks.check_backward_dv(my_flash_backward, seed=53)
### END HIDDEN TESTS

# %% [markdown]
# #### Step 2 · D, and with it dS · 15 minutes, 1 point
#
# ![One query: the tile has two of the eight entries in its rows of P and dP, and all of its rows of O and dO.](../theory/figures/row-and-tile.png)
#
# On paper: $D_i = \sum_k P_{ik}\, dP_{ik}$, where $dP_{ik}$ is the product of row $i$ of $dO$ with row $k$ of $V$. Express
# $D$ without a sum over $k$. Then write $dS$ of one tile.
#
# | `score_gradient` | shape | |
# | --- | --- | --- |
# | `p` | `(..., rows, cols)` | one tile of $P$ |
# | `dout`, `out` | `(..., rows, head_dim)` | the tile's rows of $dO$ and $O$ |
# | `v` | `(..., cols, head_dim)` | the tile's rows of $V$ |
# | returns `ds` | `(..., rows, cols)` | $P \circ (dP - D)$ |
#
# <details><summary>Hint 1: a nudge</summary>
#
# In the sum over $k$, what does not depend on $k$? Move it to the front.
#
# <details><summary>Hint 2: the idea</summary>
#
# $\sum_k P_{ik}\, (dO_i \cdot v_k) = dO_i \cdot \sum_k P_{ik}\, v_k$. You know the second sum by another name.
#
# <details><summary>Hint 3: an outline</summary>
#
# The second sum is row $i$ of $O$. So $D_i = dO_i \cdot O_i$: multiply `dout` and `out` entry by entry, and add up each row. In code
# $D$ needs a last dimension of 1 (`keepdim=True`). Then $dP = dO\, V^\top$, and $dS = P \circ (dP - D)$.
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-5-backward-scores", "locked": false, "schema_version": 3, "solution": true, "task": false}
def score_gradient(p, dout, out, v):
    """The gradient dS of one tile of scores."""
    ### BEGIN SOLUTION
    delta = (dout * out).sum(dim=-1, keepdim=True)
    return p * (dout @ v.mT - delta)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-5-backward-scores-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_score_gradient(score_gradient)
### BEGIN HIDDEN TESTS
checks.check_score_gradient(score_gradient, seed=54)
### END HIDDEN TESTS

# %% [markdown]
# #### Step 3 · dQ and dK, and the mask · 15 minutes, 4 points
#
# ![Two loop orders. Left, queries outside: O of a block stays. Right, keys outside: dK and dV of a block stay, while the queries pass.](../theory/figures/loop-order.png)
#
# Go back to `my_flash_backward`. Each tile's $dS$ gives a part of `dk` for its columns and a part of `dq` for its rows: add them up.
# (Call `score_gradient`, or compute $D$ once before the loops, which is cheaper.) Then add the causal mask, as in exercise 1-4.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which of the two gradients is finished when the inner loop ends, and which collects parts across the outer loop?
#
# <details><summary>Hint 2: the idea</summary>
#
# Both contain the scale $1/\sqrt d$, because $S$ does. For a query without keys, replace its `lse` by `+inf`: then
# `exp(s - lse)` is 0.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
#         ds = dS of the tile
#         dk of cols += scale times ds transposed times q of rows
#         dq of rows += scale times ds times k of cols
# ```
# </details></details></details>

# %% nbgrader={"grade": true, "grade_id": "ex-1-5-backward-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_backward_values(my_flash_backward)
### BEGIN HIDDEN TESTS
checks.check_backward_values(my_flash_backward, seed=51)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-5-backward-edges", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_backward_edges(my_flash_backward)
### BEGIN HIDDEN TESTS
checks.check_backward_edges(my_flash_backward, seed=52)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-5-backward-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_backward_memory(my_flash_backward)

# %% [markdown]
# Both passes together make a `torch.autograd.Function`. The next cell builds one from your two functions if they pass
# their checks. Otherwise it takes the lab's own functions. (The lab's own class is `FlashAttentionFunction` in
# `labsupport/attention/flash_torch.py`.) The cell after it compares the gradients with finite differences, and shows
# what is stored for the backward pass.

# %%
from labsupport.attention.flash_torch import flash_attention_backward

backward = checks.solution_or_reference(
    my_flash_backward,
    lambda *args: flash_attention_backward(*args[:7], block_q=args[7], block_k=args[8]),
    checks.check_backward_values,
    checks.check_backward_edges,
)


class MyFlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal, block):
        out, lse = forward(q, k, v, is_causal, block, block)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = is_causal, block, block
        return out

    @staticmethod
    def backward(ctx, dout):
        return *backward(dout, *ctx.saved_tensors, *ctx.options), None, None


# %%
inputs = [torch.randn(2, 20, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
for is_causal in (False, True):
    right = torch.autograd.gradcheck(
        lambda *qkv, causal=is_causal: MyFlashAttention.apply(*qkv, causal, 16),
        inputs,
        fast_mode=True,
    )
    print(f"causal {is_causal}: gradients equal finite differences: {right}")
out = MyFlashAttention.apply(*inputs, True, 16)
print("kept for the backward:", [tuple(t.shape) for t in out.grad_fn.saved_tensors])

# %% [markdown]
# Q, K, V, O and one number for each row are stored, but no matrix of 20 × 20.
#
# Now `"mine"` can train, too:

# %%
if forward is my_flash_forward and backward is my_flash_backward:
    mine_trains = True
    register_backend("mine", lambda q, k, v, causal: MyFlashAttention.apply(q, k, v, causal, 256))
else:
    print("In training, your own line waits for exercises 1-4 and 1-5.")

# %% [markdown]
# ## 1.7 · The fast ones, through one function
# *Core · 2 minutes*
#
# Libraries that implement FlashAttention differ in layout, option names, the alignment of causal masks and even the
# log-sum-exp of an empty row. The lab has one function for all, with the conventions of flash-attn:
#
# ```python
# attention(q, k, v, causal=False, backend="auto")   # (batch, seqlen, heads, head_dim)
# ```
#
# ![A token's vector, in which the heads lie side by side, in two layouts: token by token, and head by head.](../theory/figures/layouts.png)
#
# Models written for SDPA use the other layout, `(batch, heads, seqlen, head_dim)`. If you mix up the two, shapes
# still fit, but attention runs across the heads of one token instead of across tokens. The lab's function raises an
# error if it sees more than 128 heads, and more heads than keys. It cannot detect a shorter sequence in the wrong layout, so check your shapes.

# %%
q, k, v = (
    torch.randn(2, 8, 1024, 64) for _ in range(3)
)  # (batch, heads, seqlen, head_dim): wrong here
try:
    attention(q, k, v)
except ValueError as error:
    print(type(error).__name__, "-", error)

# %% [markdown]
# Now with the right layout. Which backend will run here, according to the card at the top?

# %%
predicted_backend = None  # a name, such as "sdpa_flash"

# %%
q, k, v = (t.transpose(1, 2).to(device) for t in (q, k, v))
out = attention(q, k, v, causal=True)
print(f"you predicted {predicted_backend}; it was:", last_call(), sep="\n")

# %% [markdown]
# `last_call()` shows which backend and kernel ran, and why others did not. If you ask for a backend by name, you get
# this backend, or an error that says why it cannot run. `flash_attention(...)` is the same function without the
# textbook implementations.
#
# > **A common error.** "SDPA means FlashAttention." SDPA chooses among several kernels. On a CPU it uses its FlashAttention
# > kernel by default. On a GPU the choice depends on dtype, mask, shape and GPU generation. With float32 or an explicit
# > mask, you don't get FlashAttention. The newest GPUs (Hopper, Blackwell) try the kernel of cuDNN, NVIDIA's library,
# > first. Check with `last_call()`.
#
# > **A common error.** "flash-attn runs on every GPU since Turing." Since version 2.0 it needs Ampere (an A100, an RTX 30) or a
# > newer one.
# > On older GPUs use `sdpa_efficient`. `available_backends()` lists what runs on your machine:

# %%
available_backends(device=device)

# %% [markdown]
# ## 1.8 · The comparison
# *Core · 5 minutes*
#
# The measurement takes some seconds, on a slow CPU up to half a minute. At four lengths, it compares the textbook
# (`standard`), yours (`mine`, if you have solved 1-4) and PyTorch's FlashAttention kernel (`sdpa_flash`; an
# older GPU takes `sdpa_efficient` instead). It also measures the lab's FlashAttention in plain PyTorch, `flash_torch`.
# All get the same inputs in the same dtype, without a mask. Guess: at 4,096 tokens, how many times as fast as the textbook is the forward pass of `sdpa_flash`?

# %%
predicted_speedup = None  # your guess, a number, before you run the next cells

# %%
from labsupport.profiling import grid, readable, run_grid, speedup

dtype = "float32"
if device.type == "cuda":
    dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
here = [s.name for s in available_backends(device=device) if s.runs]
wanted = ("standard", "flash_torch", "mine", "sdpa_flash", "sdpa_efficient")
chosen = [name for name in wanted if name in here]
table = run_grid(
    grid(chosen, lengths, heads=heads, head_dim=head_dim, dtype=dtype),
    device=device,
    max_seconds=0.1,
    measure_error=False,
)
table = speedup(table, over="standard")
readable(table)

# %%
from labsupport.profiling import arithmetic_bound_ms, score_mib

longest = table[table.seqlen == lengths[-1]].set_index("backend")
fused = "sdpa_flash" if "sdpa_flash" in chosen else "sdpa_efficient"
gain = longest.speedup[fused]
checks.compare_prediction("Speed-up at 4,096 tokens", predicted_speedup, gain, "times")
rate = ceilings.matmul_tflops[dtype]
plotting.plot_time(
    table,
    title=f"At 4,096 tokens {fused} is {gain:.1f} times as fast as the textbook",
    references=[plotting.Reference("arithmetic alone", arithmetic_bound_ms(table, rate))],
)

# %% [markdown]
# The dotted line is the time of the arithmetic alone, at the matrix-multiplication speed that you measured in section 1.3.
#
# At 512 tokens there is little memory to save, and each implementation has fixed costs: the gap is small, or even
# reversed. The gain grows with the length until memory alone limits the textbook. From there on the gain stays about
# the same.

# %%
saving = longest.peak_memory_bytes["standard"] / longest.peak_memory_bytes[fused]
plotting.plot_memory(
    table,
    title=f"At 4,096 tokens the textbook needs {saving:.0f} times the memory of {fused}",
    references=[plotting.Reference("S and P by formula", score_mib(table))],
)

# %% [markdown]
# Remember this chart. The textbook's memory rises by a factor of 4 per doubling, as the formula says. FlashAttention's
# rises far more slowly. (At short lengths, fixed costs such as the memory of one tile dominate.) Your function, if it
# is in the chart, has FlashAttention's memory, but not its speed: it is a loop in Python, with a kernel for each line.
#
# ### 32,768 tokens
#
# One head at 32,768 tokens has a score matrix of 32,768 × 32,768: 4 GiB in float32, and $P$ is as large again. Your
# loop needs a tile of it at a time (the cell takes up to half a minute on a busy laptop):

# %%

long = [torch.randn(1, 32_768, 1, 64, device=device) for _ in range(3)]
q, k, v = (x.transpose(1, 2) for x in long)
by_loop = measure_peak_memory(lambda: forward(q, k, v, False, 1024, 1024), device=device)
by_kernel = measure_peak_memory(lambda: attention(*long), device=device)
whose = "your loop" if forward is my_flash_forward else "the lab's loop"
for name, mib in {
    "S and P, by formula": 2 * 4 * 32_768**2 / 2**20,
    whose: by_loop.peak_bytes / 2**20,
    last_call().backend: by_kernel.peak_bytes / 2**20,
}.items():
    print(f"{name:20} {mib:8,.0f} MiB")

# %% [markdown]
# Now add the backward pass: the textbook stores $P$ for it, and FlashAttention recomputes $P$. Guess: at 512 tokens,
# forward and backward together, how many times as fast is `sdpa_flash`? (Less than 1 means slower.)

# %%
predicted_small = None  # your guess, a number, before you run the next cell

# %%
shape = {"heads": heads, "head_dim": head_dim, "dtype": dtype}
trained = [name for name in chosen if name != "mine" or mine_trains]
cases = grid(trained, lengths[:3], **shape, direction="forward+backward")
training = run_grid(cases, device=device, max_seconds=0.2, measure_error=False)
training = speedup(training, over="standard")
small = training[(training.seqlen == 512) & (training.backend == fused)].speedup.item()
checks.compare_prediction("Forward and backward, 512 tokens", predicted_small, small, "times")
readable(training)

# %% [markdown]
# > **A common error.** "FlashAttention is always faster." On short sequences the recomputation may cost more than it saves. Did it, on
# > your device?
#
# ### What a causal mask changes
#
# With a causal mask, FlashAttention skips the tiles above the diagonal, half of the arithmetic. The textbook computes
# every score, then makes more passes to hide half of the scores. So the speed-up for causal attention combines memory
# saved and work skipped. Speed-up
# over the textbook at 2,048 tokens:

# %%
cases = grid(["standard", fused], [2048], **shape, causal=[False, True])
masked = run_grid(cases, device=device, max_seconds=0.2, measure_error=False)
masked = speedup(masked, over="standard")
masked.pivot(index="backend", columns="causal", values="speedup").round(1)

# %% [markdown]
# ### Out of memory is a result
#
# At 262,144 tokens the textbook fails on every device. On a CPU the lab predicts the failure, so that your machine
# does not freeze; on a GPU it tries, and catches the error. Either way you get a row in the table. (The prediction is
# cautious: it allows for four matrices of $N \times N$, where the formula of exercise 1-2 counts two.)

# %%
cases = grid(["standard"], [262_144], heads=heads, head_dim=head_dim, dtype="float32")
wall = run_grid(cases, device=device, measure_error=False, progress=False)
for row in wall.itertuples():
    print(f"{row.backend} at {row.seqlen:,} tokens: {row.status} ({row.reason[:120]})")

# %% [markdown]
# ## 1.9 · Are they equal?
# *Core · 2 minutes*
#
# ![Relative error of one row in float32 against its number of keys: rescaling many times hardly increases it, and small blocks give a larger error than large ones.](../theory/figures/rescaling-error.png)
#
# In exact arithmetic the implementations give equal results. In floating point, sums in another order round
# differently. How large an error is acceptable depends on the dtype. The next table compares each implementation with
# an *oracle*, the same mathematics in float64. Guess: by what factor does the textbook's error grow from float32 to
# bfloat16?

# %%
predicted_growth = None  # your guess, a number, before you run the next cell

# %%
from labsupport.profiling import errors_by_dtype

errors = errors_by_dtype(["standard", "flash_torch", "sdpa_flash"], device=device)
of_textbook = errors[errors.backend == "standard"].set_index("dtype")["max error"].astype(float)
growth = of_textbook["bfloat16"] / of_textbook["float32"]
checks.compare_prediction("Error, bfloat16 over float32", predicted_growth, growth, "times")
errors

# %% [markdown]
# From float32 to bfloat16 the error grows by three to four orders of magnitude, for the textbook as well. So compare an
# implementation with the textbook *in the same dtype*. In flash-attn's tests the maximum error may be at most twice the
# textbook's (three times for gradients), plus $10^{-5}$: the column *allowed*.
#
# FlashAttention often has a *smaller* error than the textbook, because it keeps scores and sums in float32:
# compare the relative errors. (Fused kernels round $P$ and the output, and `flash_torch` rounds only the output.)

# %% [markdown]
# ## 1.10 · Which dtype?
# *Further (optional) · 20 minutes*
#
# A wrong dtype can cause an error message or, worse, a NaN. The ranges (TF32 is how a GPU's matrix units may read
# float32: its range, but fewer digits):
#
# ![Ranges of float32, TF32, bfloat16 and float16 on a logarithmic axis: float16 ends at 65,504, bfloat16 reaches as far as float32.](../theory/figures/dtype-ranges.png)
#
# float16 has a small range. bfloat16 has float32's range, and steps eight times as coarse as float16's. A model that
# mixes dtypes may pass a kernel tensors that do not match:

# %%
q, k, v = (torch.randn(1, 128, 4, 64, device=device) for _ in range(3))
try:
    torch.nn.functional.scaled_dot_product_attention(q, k.bfloat16(), v)
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(". ")[0])

# %% [markdown]
# Kernels want *one* dtype for q, k and v. Each kernel takes only certain dtypes:
#
# | kernel | takes |
# | --- | --- |
# | PyTorch's FlashAttention for CPUs | float16, bfloat16, float32, float64 |
# | PyTorch's FlashAttention for GPUs, flash-attn | float16, bfloat16 (flash-attn 3 also FP8): the dtypes in which matrix units are fast |
# | FlexAttention, this lab's `flash_triton` | float16, bfloat16, float32 |
#
# > **Two common errors.** "FlashAttention refuses float32." Only its GPU kernels do; the algorithm works in any
# > dtype. "Mixed dtypes raise `TypeError`." They raise the error above. Inside `torch.autocast` there is no error:
# > SDPA casts silently.
#
# ### Small inputs, large scores
#
# Take q and k with 40 in every entry, in float16. Each score is $40 \cdot 40 \cdot 64 = 102{,}400$ before it is scaled, and
# float16 ends at 65,504. Guess: how many of the 1,024 output numbers are NaN, with textbook attention and with FlashAttention, both in
# float16?

# %%
predicted_nan_textbook, predicted_nan_flash = None, None  # two numbers from 0 to 1,024

# %%
from labsupport.precision import experiments

overflow = experiments.float16_logits_overflow().set_index("computation")
for name, guess in (
    ("textbook, float16", predicted_nan_textbook),
    ("FlashAttention, float16", predicted_nan_flash),
):
    nan = int(overflow["NaN in output"][name])
    print(f"{name}: {nan:,} of 1,024 numbers are NaN; you predicted {guess}")
overflow


# %% [markdown]
# Textbook attention stores the scores in float16, where they are infinite, and the softmax of infinities is NaN.
# FlashAttention keeps its tile of scores in float32, inside the kernel. So only the inputs have to fit into the
# dtype: a large $QK^\top$ causes *no overflow*. (It does cause larger rounding errors: see below.)

# %% [markdown]
# ### Exercise 1-6 · Half precision, without regret
# ●●○ · 15 minutes · 4 points
#
# Cast inputs of any floating dtypes for a kernel that takes only float16 and bfloat16.
#
# | `half_dtype(q, k, v)` returns | when |
# | --- | --- |
# | `torch.bfloat16` | one of the three is bfloat16 already, or holds a finite number that float16 would turn into infinity: a magnitude of 65,520 or more |
# | `torch.float16` | otherwise: its steps are finer |
#
# (float16 ends at 65,504, and its last step is 32 wide. Numbers above the end are rounded down to 65,504 if they are
# less than half a step away, and become infinity from 65,504 + 16 = 65,520 on.)
#
# ![The last numbers of float16 on a line, 32 apart: what lies below 65,520 rounds to 65,504, and from 65,520 on to infinity.](../theory/figures/float16-end.png)
#
# `half_attention(q, k, v)` calls `attention` in that dtype, and returns the result in the dtype of `q`. All tensors are
# `(batch, seqlen, heads, head_dim)`. Each input gets its gradient in its own dtype.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Two reasons lead to bfloat16. How do you find each of them in one tensor? Which entries do not count, because
# bfloat16 does not help them?
#
# <details><summary>Hint 2: the idea</summary>
#
# Ignore infinite and NaN entries, with `isfinite()`, before you look for the largest magnitude. `.to(dtype)`
# is differentiable, and its backward casts the gradient back, so you need no code for that.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# half_dtype: for each of q, k, v:
#     bfloat16, if its dtype is bfloat16, or if any finite magnitude is 65,520 or more
# float16, if none of them was
# half_attention: cast all three, call attention, cast the result to the dtype that q had
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-6-half-precision", "locked": false, "schema_version": 3, "solution": true, "task": false}
def half_dtype(q, k, v):
    """torch.bfloat16 or torch.float16: which of them q, k and v should be cast to."""
    ### BEGIN SOLUTION
    for x in (q, k, v):
        finite = x[x.isfinite()]
        if x.dtype == torch.bfloat16 or (finite.abs() >= 65_520).any():
            return torch.bfloat16
    return torch.float16
    ### END SOLUTION


def half_attention(q, k, v):
    """Attention in half precision; the result in the dtype of q."""
    ### BEGIN SOLUTION
    dtype = half_dtype(q, k, v)
    return attention(q.to(dtype), k.to(dtype), v.to(dtype)).to(q.dtype)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-6-half-precision-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_half_dtype_values(half_dtype)
### BEGIN HIDDEN TESTS
checks.check_half_dtype_values(half_dtype, seed=61)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-6-half-precision-edges", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_half_dtype_edges(half_dtype)
### BEGIN HIDDEN TESTS
checks.check_half_dtype_edges(half_dtype, seed=62)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-6-half-precision-attention", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_half_attention(half_attention)
### BEGIN HIDDEN TESTS
checks.check_half_attention(half_attention, seed=63)
### END HIDDEN TESTS

# %% [markdown]
# The lab's own function `safe_flash_attention` does more, since it casts to float32 if the kernel accepts that, and also
# uses bfloat16 if a tensor's values are too close to 0 for float16. The report of `safe_flash_attention` says what was
# cast, and how large the error is. (`PrecisionTracker` checks the inputs of a whole model.) A GPU's kernels take only float16 and
# bfloat16. With `dtypes=`, the call below allows only these on a CPU, too:

# %%
import warnings

from labsupport.precision import PrecisionWarning, safe_flash_attention

warnings.simplefilter("ignore", PrecisionWarning)  # its warnings: here we print instead
halves = (torch.float16, torch.bfloat16)
_, report = safe_flash_attention(q, k.bfloat16(), v, dtypes=halves, return_report=True)
print(report)

# %% [markdown]
# The size of the scores also decides how much *rounding* matters. A score of 1,000 with a relative error of 0.0005 is
# off by 0.5. This can swap the order of two keys with similar scores.
#
# ![Relative error of the output against the size of the scores, for bfloat16, float16 and float32: it grows with the scores in each of them.](../theory/figures/error-by-scale.png)
#
# This error comes from rounding the *inputs*, so no kernel can avoid it. Models keep their scores small by the factor
# $1/\sqrt d$ and by normalising q and k. [Chapter 6](../theory/06-precision.md) derives this, and has a table with
# the right dtype for each component of a model.

# %% [markdown]
# ## 1.11 · On a data-centre GPU
# *Further (optional) · 4 minutes*
#
# The charts of this section show recorded measurements; their small print names the device and the date. If you have
# a GPU, compare them with your own measurements.

# %%
from labsupport.profiling import load_run

recorded = load_run("attention-h200")
everything = speedup(recorded, over="standard")
recorded = recorded[~recorded.causal & (recorded.direction == "forward")]
peak = gpus.bf16_tflops["H200"]
plotting.plot_time(
    recorded,
    title="On an H200 every fused kernel beats the textbook, at every length",
    references=[plotting.Reference("arithmetic at peak", arithmetic_bound_ms(recorded, peak))],
)

# %%
plotting.plot_memory(
    recorded,
    title="On an H200, too, only textbooks pay for N × N",
    references=[plotting.Reference("S and P by formula", score_mib(recorded))],
)

# %% [markdown]
# At which length does the best kernel come within a factor of two of the dotted line, and why not before?
#
# <details><summary>An answer</summary>
#
# At 4,096 tokens. The *distance* to the line shows how well a kernel uses the GPU; at 512 tokens there is too little work to
# fill it. </details>
#
# `flash_torch` saves the memory but not the time, since each of its small steps is a separate kernel, in float32, and the
# GPU's matrix units, its tensor cores, stay idle; *fusion* fixes that. (`sdpa_math` is PyTorch's own textbook.)
#
# A causal mask changes the ratios here, too (section 1.8). At 4,096 tokens:

# %% tags=["nbval-check-output"]
at_4k = everything[(everything.seqlen == 4096) & (everything.direction == "forward")]
print("Times as fast as the textbook, H200, 4,096 tokens")
print(at_4k.pivot(index="backend", columns="causal", values="speedup").round(1).to_string())

# %% [markdown]
# The run stores its command. You can repeat it on any GPU if your copy of the lab has a `benchmarks` folder:

# %%
print(recorded.attrs["provenance"]["command"])


# %% [markdown]
# ## 1.12 · Find the fault
# *Further (optional) · 15 minutes*
#
# In the following program each token looks for similar tokens *at least* `gap` places before it:
#
# ![An 8 by 8 square of tokens for a gap of 3: token 3 may look at token 0, token 7 at tokens 0 to 4, and the first three tokens at none.](../theory/figures/gap-mask.png)
#
# No other token may see the last token. So if the last token changes, only its own output may change:


# %% tags=["nbval-check-output"]
def recall(x, gap):
    """For each token, (seqlen, head_dim), what it finds at least `gap` tokens before it."""
    position = torch.arange(len(x))
    hidden = position[:, None] - position < gap
    scores = x @ x.T / math.sqrt(x.shape[-1])
    weights = (scores + hidden * -10_000.0).softmax(dim=-1)
    return weights @ x


x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
other = x.clone()
other[-1] = 5.0
change = (recall(other, 4) - recall(x, 4)).abs()[:-1]
print(f"largest change of the outputs before the last token: {change.max():.2f}; it must be 0")


# %% [markdown]
# ### Exercise 1-8 · A token sees the future
# ●●○ · 12 minutes · 0 points (optional)
#
# Write three functions. Experiment in cells of your own.
#
# | function | returns |
# | --- | --- |
# | `rows_that_leak(seqlen, gap)` | how many of the `seqlen` tokens have an output that depends on tokens they must not see |
# | `cause()` | the letter of the cause, such as `"A"` |
# | `repaired(x, gap)` | what `recall` should return: copy it, and change one line. A token that may see nothing gets zeros |
#
# | | possible causes |
# | --- | --- |
# | A | the comparison with `gap` is off by one: a token sees one key too many |
# | B | the softmax runs over the queries, not over the keys |
# | C | 10,000 is too small: beside a large score a hidden key keeps some weight |
# | D | where all keys of a row are hidden, all its scores fall by the same amount |
# | E | near −10,000 float32 has steps of 0.001: the scores are rounded, and hidden keys come back |
# | F | the mask is transposed: tokens see what comes after them |
#
# <details><summary>Hint 1: a nudge</summary>
#
# `change.amax(dim=-1)` has a number for each row. Which rows change, and what do they have in common?
#
# <details><summary>Hint 2: the idea</summary>
#
# Compare the weights of such a row with the softmax of its scores *before* the mask was added. Test each cause:
# repair only this cause, and see whether the outputs still change.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# rows_that_leak: the rows that have no key at least gap before them
# repaired:       the same program, but weights are 0 wherever a key is hidden;
#                 or: hidden scores are -inf, and then NaN in the weights becomes 0
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-8-fault", "locked": false, "schema_version": 3, "solution": true, "task": false}
def rows_that_leak(seqlen, gap):
    """Number of tokens whose output depends on tokens that they must not see."""
    ### BEGIN SOLUTION
    return min(gap, seqlen)
    ### END SOLUTION


def repaired(x, gap):
    """The output that `recall` should return."""
    ### BEGIN SOLUTION
    i = torch.arange(len(x))
    visible = i[:, None] - i >= gap
    scores = (x @ x.mT / math.sqrt(x.shape[-1])).masked_fill(~visible, -torch.inf)
    return scores.softmax(dim=-1).nan_to_num() @ x  # NaN: rows without a key
    ### END SOLUTION


# %% nbgrader={"grade": false, "grade_id": "ex-1-8-cause", "locked": false, "schema_version": 3, "solution": true, "task": false}
def cause():
    """The letter of the cause."""
    ### BEGIN SOLUTION
    return "D"
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-8-fault-rows", "locked": true, "points": 0, "schema_version": 3, "solution": false, "task": false}
checks.check_leaking_rows(rows_that_leak)
### BEGIN HIDDEN TESTS
checks.check_leaking_rows(rows_that_leak, seed=81)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-8-cause-letter", "locked": true, "points": 0, "schema_version": 3, "solution": false, "task": false}
checks.check_leak_cause(cause)

# %% nbgrader={"grade": true, "grade_id": "ex-1-8-fault-output", "locked": true, "points": 0, "schema_version": 3, "solution": false, "task": false}
checks.check_recall(repaired)
### BEGIN HIDDEN TESTS
checks.check_recall(repaired, seed=82)
### END HIDDEN TESTS

# %% [markdown]
# A program with this fault passes most tests: its loss goes down, its shapes are right, and only the first few rows
# are wrong. To find a leak, *change* one input and look at what else changes. This works for any mask and any model.

# %% [markdown]
# ## What you measured
#
# - Textbook attention needs $2 \cdot B \cdot H \cdot N^2$ elements for $S$ and $P$: formula and measurement agree.
# - Softmax can be computed block by block, exactly, with a running maximum and sum.
# - FlashAttention's forward and backward are each two nested loops over tiles. They store one number for each query,
#   not one for each pair of a query and a key.
# - The gain depends on length, device and dtype.
# - Two correct implementations differ by rounding. To judge an implementation, compare its error with the textbook's in
#   the same dtype.
# - A kernel wants one dtype for q, k and v. Whether float16 is possible depends on the size of these inputs, not of the
#   scores.
#
# ### Three questions
#
# <details><summary>1. FlashAttention does <em>more</em> floating-point operations than the textbook, in the backward pass. Why is it faster?</summary>
#
# Recomputing $S$ costs one more matrix product: five instead of four. But the textbook writes and reads $N \times N$
# matrices several times, and that takes longer than the product. </details>
#
# <details><summary>2. Why does the forward pass return the log-sum-exp and not m and ℓ?</summary>
#
# The backward needs only the combination: $e^{s-m}/\ell = e^{s - (m + \ln \ell)}$. It is one number a row instead
# of two, and you can merge results over different keys with it.
# </details>
#
# <details><summary>3. Your running sum is right, but the output is wrong from the second block of keys on. What is the likely mistake?</summary>
#
# The accumulator $O$ was not rescaled by $e^{m - m'}$ when the maximum rose. The first block needs no rescaling. </details>
#
# ### Read on
#
# - [The theory](../theory/README.md): chapters 1 and 2 belong to sections 1.1 to 1.4, chapter 3 to sections 1.5 and 1.6, and
#   chapter 6 to section 1.10.
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Ré: *FlashAttention: Fast and Memory-Efficient Exact Attention with
#   IO-Awareness* (2022), arXiv:2205.14135. Sections 2 and 3; appendix B derives the backward.
# - T. Dao: *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning* (2023),
#   arXiv:2307.08691. Section 3 has the loop order that you wrote.
# - M. Milakov, N. Gimelshein: *Online normalizer calculation for softmax* (2018), arXiv:1805.02867.
# - [Eight bits, and outliers](further/eight-bits.ipynb), with exercise 1-7.
# - `labsupport/attention/flash_torch.py`: the lab's version of exercises 1-4 and 1-5, with more options.

# %% [markdown]
# ### How far you are
#
# The checks run once more, on what you have defined. (In a terminal, `labsupport progress` reads the saved notebooks.)

# %%
from labsupport.course.progress import show_progress

show_progress("01", globals())
