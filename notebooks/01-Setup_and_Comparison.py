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
# Textbook attention (black) outgrows every GPU. FlashAttention (blue) computes the same result, but its memory grows
# only with the length, not with its square. Here you write FlashAttention. In section 1.6 your own function attends over
# 32,768 tokens on this machine, where the textbook would need 8 GiB for one head.
#
# **After this notebook you can**
#
# - write textbook attention, and say why memory makes it slow;
# - write FlashAttention's forward pass, and measure it beside fast kernels;
# - judge a numerical error, and choose between float16 and bfloat16.
#
# **Time**: about 150 minutes (estimated), of which the exercises take 105. Good places to pause: after 1.4 and 1.6.
#
# **You need** PyTorch (tensors, `matmul`), but no CUDA and no GPU.
#
# **Theory**, not required: chapters [1](../theory/01-memory-bottleneck.md), [2](../theory/02-online-softmax.md),
# [3](../theory/03-forward-and-backward.md) and [6](../theory/06-precision.md), and the
# [glossary](../theory/glossary.md).
#
# **Exercises**: 1-1, 1-3, 1-4, 1-6 (other numbers: bonus, in `further/`); ●●● is the hardest. Run the cells in order, and
# replace `raise NotImplementedError` with your code. The cell after yours says what is wrong; hints unfold in
# stages. *Run All* stops at an unsolved exercise: scroll up to the red message.

# %%
import math

import torch

from labsupport import checks, plotting
from labsupport.attention import attention, available_backends, last_call
from labsupport.profiling import environment_card

torch.manual_seed(0)
environment_card()

# %% [markdown]
# The card names your device, and the implementations of attention that run on it, called *backends*. `standard` is
# textbook attention. In a terminal, `labsupport doctor` says what is missing.

# %%
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
heads, head_dim = (16, 64) if device.type == "cuda" else (4, 64)
lengths = [512, 1024, 2048, 4096]

# %% [markdown]
# ## 1.1 · Attention, as the textbook writes it
#
# For one head, with $N_q$ queries, $N_k$ keys and values, and head dimension $d$:
#
# $$
# S = \frac{Q K^\top}{\sqrt d} \in \mathbb{R}^{N_q \times N_k}, \qquad
# P = \operatorname{softmax}(S) \text{ row by row}, \qquad
# O = P V \in \mathbb{R}^{N_q \times d}
# $$
#
# Row $i$ of $P$ says how much query $i$ takes from each value. A *mask* hides some keys: a language model hides the
# future with a *causal* mask. To hide a key, set its score $s$ to $-\infty$: then its weight, $e^{s}/\sum e^{s}$, is 0.
# Is a large negative number enough?

# %%
scores = torch.zeros(2, 3, dtype=torch.float16)
mask = torch.tensor([[True, False, True], [False, False, False]])  # query 1 may look nowhere

try:
    scores.masked_fill(~mask, -1e9)
except RuntimeError as error:
    print("-1e9 in float16:", error)

print("-inf, then softmax:", scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).tolist())
plotting.plot_weights(
    {"the mask above": mask, "causal": torch.ones(6, 6).tril()},
    title="Masks (dark: visible). In the first, query 1 sees no key",
)


# %% [markdown]
# The number $-10^9$ does not fit into float16, which ends at 65,504. $-10^4$ fits, but has another fault: section 1.10.
# With $-\infty$, a row whose keys are all hidden becomes $0/0$ = NaN. Such rows appear in 1.10. FlashAttention and
# PyTorch's `scaled_dot_product_attention` (SDPA) *define* the output of such a row as 0, and so will you.
#
# ### Exercise 1-1 · Textbook attention with a mask
# ●○○ · essential · 15 minutes · 5 points
#
# | | shape | |
# |---|---|---|
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
# dimension is `q.shape[-1]`.
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


# %% nbgrader={"grade": true, "grade_id": "ex-1-1-textbook-attention-values", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
checks.check_textbook_values(textbook_attention)
checks.check_textbook_mask(textbook_attention)
checks.check_textbook_empty_rows(textbook_attention)
### BEGIN HIDDEN TESTS
checks.check_textbook_values(textbook_attention, seed=11)
checks.check_textbook_mask(textbook_attention, seed=12)
checks.check_textbook_empty_rows(textbook_attention, seed=13)
### END HIDDEN TESTS

# %% [markdown]
# With the identity matrix as values, the output *is* the weights. Queries and keys are the
# same here. In the last picture six queries see nothing.

# %%
from labsupport.attention import standard_attention

own_attention = checks.solution_or_reference(
    textbook_attention, standard_attention, checks.check_textbook_values
)
all_pairs = torch.ones(12, 12, dtype=torch.bool)
x, identity = 0.4 * torch.randn(12, head_dim), torch.eye(12, head_dim)
masks = {"no mask": None, "causal": all_pairs.tril(), "6 or more back": all_pairs.tril(-6)}
plotting.plot_weights(
    {name: own_attention(x, x, identity, mask)[0][:, :12] for name, mask in masks.items()},
    title="Each token attends most to itself, unless it is hidden",
)


# %% [markdown]
# ## 1.2 · What it costs: N × N
#
# Textbook attention has $S$ and $P$ in memory at the same time. Each has `seqlen` × `seqlen` entries for every head and
# every sequence of the batch.


# %%
def score_bytes(batch, heads, seqlen, bytes_per_element):
    """Bytes of S and P together."""
    return 2 * batch * heads * seqlen**2 * bytes_per_element


# %% [markdown]
# An H200 has 140 GiB. One sequence, 32 heads, float16: at how many tokens does *one layer* fill it?
#
# <details><summary>Compute first, then look</summary>
#
# $\sqrt{140\cdot2^{30}/(2\cdot32\cdot2)}$, about 34,000. In training, $P$ of *every layer* is stored for the
# backward pass. With 32 layers the limit is at $\sqrt{140\cdot2^{30}/(32\cdot32\cdot2)}$, about 8,600 tokens:
# the solid black line of the first figure. </details>
#
# Now a measurement. `measure_peak_memory` counts the bytes that a call allocates at its peak. Guess: how many MiB does
# textbook attention need at 4,096 tokens, in float32, with your number of heads?

# %%
predicted_mib = None  # your guess, a number, before you run the next cell

# %%
import pandas as pd

from labsupport.profiling import measure_peak_memory


def measured_bytes(seqlen):
    q, k, v = torch.randn(3, 1, heads, seqlen, head_dim, device=device)
    return measure_peak_memory(lambda: own_attention(q, k, v)).peak_bytes


memory = pd.DataFrame({"tokens": lengths})
memory["formula, MiB"] = [score_bytes(1, heads, n, 4) / 2**20 for n in lengths]
memory["measured, MiB"] = [measured_bytes(n) / 2**20 for n in lengths]
most = memory["measured, MiB"].iloc[-1]
checks.compare_prediction("Memory at 4,096 tokens", predicted_mib, most, "MiB")
memory.round(1)

# %% [markdown]
# Twice the length takes four times the memory. The measured values include the output, so they are a little larger.
#
# <details><summary>Does <em>your</em> function need about 1.5 times the formula? Which third matrix is alive at the same time?</summary>
#
# The scores before they were divided by $\sqrt d$. While a name (`scores`, say) refers to the old matrix, it stays in
# memory.
# </details>

# %% [markdown]
# ## 1.3 · Memory is slow, arithmetic is fast
#
# A processor computes with numbers in a small, fast memory: SRAM, which is a GPU's shared
# memory or a CPU's caches. The large memory is far away and slow: HBM on a data-centre GPU, DRAM in a laptop.

# %%
from labsupport.profiling import hardware_table, measured_ceilings

gpus = hardware_table().set_index("name")
some = gpus.loc[["RTX 3090", "RTX 4090", "A100 SXM 80 GB", "H200", "B200"]]
pd.DataFrame(
    {
        "SRAM in all, MiB": (some.shared_kib_per_sm * some.sms / 1024).round(1),
        "memory, GiB": some.memory_gib,
        "memory bandwidth, GB/s": some.bandwidth_gb_s,
        "bfloat16, TFLOP/s": some.bf16_tflops,
    }
)

# %% [markdown]
# (Data sheets: `data/hardware.csv`.) Each of a GPU's many *multiprocessors* has its own part of the SRAM, at most 0.22
# MiB. The scores of one head at 4,096 tokens take 32 MiB in float16, and there are many heads. So $S$ and $P$ go
# through the slow memory:
#
# ![Textbook attention: four kernels pass S and P on through the slow memory, in six trips. FlashAttention: one kernel reads Q, K, V and writes O.](../theory/figures/textbook-passes.png)
#
# A *kernel* is a function that the device starts once, in many copies, called *programs*, each for a part of the data.
# PyTorch runs four: together, six trips of $N \times N$ numbers; if $Q$ is scaled, only four.
#
# Two things take time: moving the bytes, and the arithmetic, $4N^2d$ floating-point operations (FLOPs) per head. Guess:
# on an H200, with four trips at 4,096 tokens, moving the bytes takes how many times as long as the arithmetic?

# %%
predicted_ratio = None  # your guess, a number, before you run the next cell

# %% tags=["nbval-check-output"]
h200, n = gpus.loc["H200"], 4096
bytes_ms = (4 * n**2 + 4 * n * head_dim) * 2 / h200.bandwidth_gb_s / 1e6  # S, P; Q, K, V, O
arithmetic_ms = 4 * n**2 * head_dim / h200.bf16_tflops / 1e9
checks.compare_prediction(
    "Bytes over arithmetic, H200", predicted_ratio, bytes_ms / arithmetic_ms, "times"
)

# %% [markdown]
# The GPU's arithmetic units wait most of the time. So the aim is fewer trips to the slow memory, not fewer operations:
# **never write $S$ and $P$ there**. Three ideas make that possible:
#
# 1. *Tiling*: cut $Q$, $K$, $V$ into blocks, so that a tile of $S$ fits on the chip.
# 2. *Online softmax*: normalise a row without having seen all of it.
# 3. *Recomputation*: in the backward pass compute the tiles again, instead of storing them.
#
# *Fusion* then puts all steps into one kernel, so that each tile stays on the chip.
#

# %% [markdown]
# ## 1.4 · The obstacle: softmax wants the whole row
#
# To normalise a row you need the sum of all its $e^{s}$, and first its largest entry: $e^{s}$ overflows for large
# $s$, so the largest entry is subtracted. What if you take the softmax of each block, and add up the results?

# %% tags=["nbval-check-output"]
row = torch.tensor([998.0, 1000.0, 999.0, 1001.0])
values = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
print("exp overflows:", row.exp().tolist())
right = row.softmax(0) @ values
blocks = sum(s.softmax(0) @ w for s, w in zip(row.split(2), values.split(2), strict=True))
print(f"right {right.item():.4f}, block softmaxes added up {blocks.item():.4f}")


# %% [markdown]
# That is wrong: each block was normalised to 1, so the blocks lost their relative weight. Instead, divide only at the
# end. Until then, carry two numbers for each row:
#
# - $m$, the largest score seen so far, and
# - $\ell = \sum e^{s - m}$ over the scores seen so far.
#
# For example, a row of eight scores, seen two at a time:
#
# | block | new $m$ | the old $\ell$ shrinks | the block adds | new $\ell$ |
# |---|---|---|---|---|
# | 2, 1 | 2 | | $e^{0} + e^{-1} = 1.368$ | 1.368 |
# | 4, 3 | 4 | $1.368 \cdot e^{2-4} = 0.185$ | $e^{0} + e^{-1} = 1.368$ | 1.553 |
# | 1, 0 | 4 | $1.553 \cdot e^{0} = 1.553$ | $e^{-3} + e^{-4} = 0.068$ | 1.621 |
# | 5, 2 | 5 | $1.621 \cdot e^{4-5} = 0.596$ | $e^{0} + e^{-3} = 1.050$ | **1.646** |
#
# ![The eight scores with the running maximum above, and below the running sum, which shrinks when the maximum rises.](../theory/figures/running-max-and-sum.png)
#
# When a block raises the maximum from $m$ to $m'$, the sum so far is too large by a factor of exactly $e^{m' - m}$. One
# multiplication corrects it:
#
# $$
# m' = \max\bigl(m, \max_j s'_j\bigr), \qquad
# \ell' = e^{m - m'}\,\ell + \sum_j e^{s'_j - m'}
# $$
#
# This is exact, because $e^{m-m'} \sum e^{s-m} = \sum e^{s-m'}$.
#
# ### Exercise 1-3 · The running maximum and sum
# ●●○ · essential · 25 minutes · 6 points
#
# | | shape | |
# |---|---|---|
# | `scores` | `(..., cols)` | rows of scores; `-inf` hides an entry |
# | `block_size` | integer | look at this many columns at a time; the last block may be shorter |
# | returns `m` | `(...)` | the largest entry of each row |
# | returns `l` | `(...)` | the sum of `exp(score - m)` of each row |
#
# Use PyTorch operations. A row that is `-inf` throughout keeps `m = -inf` and `l = 0`.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Each row of the table above is one turn of your loop. Which of the two numbers must be updated first?
#
# <details><summary>Hint 2: the idea</summary>
#
# `scores.split(block_size, dim=-1)` cuts the blocks. Start with `m` full of `-inf` and `l` full of 0. Find the new
# maximum first. `m_new[..., None]` can be subtracted from a block.
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


# %% nbgrader={"grade": true, "grade_id": "ex-1-3-online-softmax-values", "locked": true, "points": 6, "schema_version": 3, "solution": false, "task": false}
checks.check_running_values(running_max_and_sum)
checks.check_running_extremes(running_max_and_sum)
checks.check_running_streams(running_max_and_sum)
### BEGIN HIDDEN TESTS
checks.check_running_values(running_max_and_sum, seed=31)
checks.check_running_extremes(running_max_and_sum, seed=31)
### END HIDDEN TESTS

# %% [markdown]
# ## 1.5 · FlashAttention, forward
#
# Combine tiling and online softmax. One program takes one block of $Q$ and goes through the blocks of $K$ and $V$.
# It carries $m$, $\ell$ and the *unnormalised* output $O$. $O$ is a sum of $e^{s-m} v$, so you correct it exactly like
# $\ell$. With $S_{ij}$ for the tile of scores of block $i$ of $Q$ and block $j$ of $K$:
#
# $$
# O' = e^{m - m'}\, O + e^{S_{ij} - m'}\, V_j
# \qquad\text{and after the last block}\qquad
# O \leftarrow O / \ell, \quad L = m + \ln \ell .
# $$
#
# $L$, the *log-sum-exp*, is $\ln \sum e^{s}$ of the whole row: one number instead of $m$ and $\ell$. The backward pass
# needs it.
#
# The next cell shows one program with three queries; the first row is that of section 1.4. In JupyterLab, move the
# slider.

# %%
from IPython.display import display

from labsupport.analysis.explorer import tile_pass, tile_pass_slider

scores = torch.tensor(
    [[2.0, 1, 4, 3, 1, 0, 5, 2], [5, 2, 3, 1, 4, 0, 2, 3], [0, 1, 1, 2, 2, 3, 3, 6]]
)
values = torch.eye(2).repeat(4, 1)  # 1, 0 and 0, 1 in turn: O's two columns add up to l
steps = tile_pass(scores, values, block_k=2)
display(tile_pass_slider(steps))
plotting.plot_tile_pass(steps)


# %% [markdown]
# ### Exercise 1-4 · The tiled forward, in three steps
# ●●● · essential · 45 minutes · 9 points
#
# In each step you extend the same function, and run its cell and the checks of that step again.
#
# | | shape | |
# |---|---|---|
# | `q` | `(..., seqlen_q, head_dim)` | queries |
# | `k`, `v` | `(..., seqlen_k, head_dim)` | keys and values |
# | `is_causal` | bool | step 3: if true, query `i` sees keys up to `i + seqlen_k - seqlen_q` |
# | `block_q`, `block_k` | integers | rows and columns of a tile; the last tile may be smaller |
# | returns `out` | `(..., seqlen_q, head_dim)` | in the dtype of `q` |
# | returns `lse` | `(..., seqlen_q)` | $L$, natural logarithm; `-inf` for a query that sees no key |
#
# Use PyTorch operations, and no tensor of `seqlen_q` × `seqlen_k`, not even a mask. A query that sees no key gets 0.
#
# #### Step 1 · One block of rows · 18 minutes, 3 points
#
# Treat all queries as one block, and ignore `block_q` and `is_causal`. Carry $m$, $\ell$ and $O$ through the blocks of
# keys and values: exercise 1-3, plus the tile of scores and $O$.
#
# <details><summary>Hint 1: a nudge</summary>
#
# What does the program carry from tile to tile, and what of it must be corrected when the maximum rises?
#
# <details><summary>Hint 2: the idea</summary>
#
# `x[..., cols, :]`, with `cols` a slice, takes a block out of a tensor. `q.new_full(shape, value)` has the
# dtype and device of `q`. $m$ and $\ell$ have one number for each query, a
# tile and $O$ one row: to combine them, write `m[..., None]`. Divide by $\ell$ once, after the last block.
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


# %% nbgrader={"grade": true, "grade_id": "ex-1-4-tiled-forward-rows", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_forward_rows(my_flash_forward)
checks.check_forward_lse(my_flash_forward)
### BEGIN HIDDEN TESTS
checks.check_forward_rows(my_flash_forward, seed=44)
checks.check_forward_lse(my_flash_forward, seed=42)
### END HIDDEN TESTS

# %% [markdown]
# #### Step 2 · All rows · 10 minutes, 2 points
#
# Put an outer loop over blocks of `block_q` queries around your loop. Each block starts with fresh $m$, $\ell$ and $O$,
# and stores its rows of `out` and `lse` when its inner loop ends.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which of your lines must run once for each block of queries, and which only once?
#
# <details><summary>Hint 2: the idea</summary>
#
# Make `out` (`torch.empty_like(q)`) and `lse` first, and write one block of rows into them at a time.
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

# %% nbgrader={"grade": true, "grade_id": "ex-1-4-tiled-forward-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_forward_values(my_flash_forward)
### BEGIN HIDDEN TESTS
checks.check_forward_values(my_flash_forward, seed=41)
### END HIDDEN TESTS

# %% [markdown]
# #### Step 3 · A causal mask · 17 minutes, 4 points
#
# During generation there is one new query and a long cache of keys. That query is the *last* token, so it must see all
# keys. Therefore flash-attn (version 2.1 and later) and this lab align the causal mask at the *bottom right*: query `i`
# sees keys up to `i + seqlen_k - seqlen_q`. (PyTorch's `is_causal=True` aligns it at the top left.) In tiles:

# %%
plotting.plot_tiles(seqlen_q=48, seqlen_k=64, block_q=8, block_k=8)

# %% [markdown]
# Add the mask to your function, tile by tile. You may skip tiles, or compute and mask all of them. If `seqlen_q` is
# larger than `seqlen_k`, some rows see no key.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which rows of `q` and of `k` does this tile hold?
#
# <details><summary>Hint 2: the idea</summary>
#
# With `i` the row numbers in `q` (a column vector) and `j` those in `k`,
# `j <= i + seqlen_k - seqlen_q` is the tile of the mask. `torch.arange(start, stop)` counts them.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# if is_causal: in the tile, scores become -inf where j > i + seqlen_k - seqlen_q
# m_new may still be -inf: subtract 0 there, so that exp gives 0 and not NaN
# l may still be 0 at the end: divide by 1 there; m + log(l) is then -inf, as required
# ```
# </details></details></details>

# %% nbgrader={"grade": true, "grade_id": "ex-1-4-tiled-forward-edges", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_forward_edges(my_flash_forward)
### BEGIN HIDDEN TESTS
checks.check_forward_edges(my_flash_forward, seed=43)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-4-tiled-forward-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_forward_memory(my_flash_forward)

# %% [markdown]
# You have written FlashAttention's forward pass. A GPU kernel runs the same algorithm, but keeps the tile, $m$, $\ell$
# and $O$ on the chip, and runs many blocks of $Q$ in parallel.
#
# ## 1.6 · Your line in the comparison
#
# `register_backend` gives your function the name `"mine"`, for the lab's tables and charts. It gets
# `(batch, heads, seqlen, head_dim)`, as in your exercise.

# %%
from labsupport.attention import register_backend
from labsupport.attention.flash_torch import flash_attention_forward

forward = checks.solution_or_reference(
    my_flash_forward,
    lambda q, k, v, c, bq, bk: flash_attention_forward(q, k, v, c, block_q=bq, block_k=bk),
    checks.check_forward_values,
    checks.check_forward_edges,
)
mine = "mine" if forward is my_flash_forward else "flash_torch"
if mine == "mine":
    # Larger blocks than in your checks: the loop has fewer turns.
    register_backend("mine", lambda q, k, v, causal: forward(q, k, v, causal, 256, 256)[0])
else:
    print("Your function runs here after step 3 of exercise 1-4.")
    print("Until then the charts show the lab's loop, flash_torch.")

# %% [markdown]
# The next cell measures the textbook (`standard`), your function (`mine`) and PyTorch's FlashAttention kernel
# (`sdpa_flash`; on an older GPU `sdpa_efficient`), with the same inputs, without a mask. It takes up to a minute. Each
# line of your function is a kernel, which costs time; its small tiles save memory, on a CPU also time. Guess: at
# 4,096 tokens, PyTorch's kernel is how many times as fast as the textbook?

# %%
predicted_speedup = None  # your guess, a number, before you run the next cells

# %%
from labsupport.profiling import grid, readable, run_grid, speedup

dtype = "float32"
if device.type == "cuda":
    dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
here = [s.name for s in available_backends(device=device) if s.runs]
fused = "sdpa_flash" if "sdpa_flash" in here else "sdpa_efficient"
cases = grid(["standard", mine, fused], lengths, heads=heads, head_dim=head_dim, dtype=dtype)
table = run_grid(cases, device=device, max_seconds=0.1, measure_error=False)
table = speedup(table, over="standard")
readable(table)

# %%
from labsupport.profiling import arithmetic_bound_ms, score_mib

longest = table[table.seqlen == lengths[-1]].set_index("backend")
gain = longest.speedup[fused]
checks.compare_prediction("Speed-up at 4,096 tokens", predicted_speedup, gain, "times")
rate = measured_ceilings(device).matmul_tflops[dtype]
plotting.plot_time(
    table,
    title=f"At 4,096 tokens {fused} is {gain:.1f} times as fast as the textbook",
    references=[plotting.Reference("arithmetic alone", arithmetic_bound_ms(table, rate))],
)

# %% [markdown]
# At 512 tokens there is little memory to save, and on some
# machines the textbook wins: "FlashAttention is always faster" is **a common error**. The textbook's time jumps where
# its scores outgrow the processor's cache.

# %%
saving = longest.peak_memory_bytes["standard"] / longest.peak_memory_bytes[mine]
plotting.plot_memory(
    table,
    title=f"At 4,096 tokens {mine} needs 1/{saving:.0f} of the textbook's memory",
    references=[plotting.Reference("S and P by formula", score_mib(table))],
)

# %% [markdown]
# ### Out of memory is a result
#
# At 262,144 tokens the textbook fails on every device. On a CPU the lab predicts the failure, from twice the
# formula, so that your machine does not freeze; on a GPU it tries.

# %%
cases = grid(["standard"], [262_144], heads=heads, head_dim=head_dim, dtype="float32")
wall = run_grid(cases, device=device, measure_error=False, progress=False)
for result in wall.itertuples():
    print(f"{result.backend} at {result.seqlen:,} tokens: {result.status}")
    print(result.reason[:160])

# %% [markdown]
# ### 32,768 tokens, on this machine
#
# $S$ and $P$ of one head would take 8 GiB in float32. Guess: how many MiB does your loop take, with tiles of 1,024 ×
# 1,024? (This takes up to half a minute.)

# %%
predicted_loop = None  # your guess, a number, before you run the next cell

# %%
long = torch.randn(3, 1, 32_768, 64, device=device)
by_loop = measure_peak_memory(lambda: forward(*long, False, 1024, 1024), device=device)
taken = by_loop.peak_bytes / 2**20
whose = "Your loop" if mine == "mine" else "The lab's loop"
checks.compare_prediction(f"{whose} at 32,768 tokens", predicted_loop, taken, "MiB")
print(f"S and P by formula: {score_bytes(1, 1, 32_768, 4) / 2**20:,.0f} MiB")

# %% [markdown]
# ### On a data-centre GPU
#
# The next chart was recorded. `flash_torch` is a loop like yours, and `fa4` is
# FlashAttention-4, made for such GPUs.

# %%
from labsupport.profiling import load_run

recorded = speedup(load_run("attention-h200"), over="standard")
recorded = recorded[~recorded.causal & (recorded.direction == "forward")]
recorded = recorded[recorded.backend.isin(["standard", "flash_torch", "sdpa_flash", "fa4"])]
at_4k = recorded[recorded.seqlen == 4096].set_index("backend").speedup
plotting.plot_time(
    recorded,
    title=f"On an H200, fused kernels are {at_4k.sdpa_flash:.0f} to {at_4k.fa4:.0f} times "
    "as fast as the textbook at 4,096 tokens",
    references=[
        plotting.Reference("arithmetic alone", arithmetic_bound_ms(recorded, h200.bf16_tflops))
    ],
)

# %% [markdown]
# On a GPU the loop is slower than the textbook. *Fusion* turns the saved memory into saved time.
#
# ## 1.7 · Two loop orders, and the backward pass
#
# You have written *version 2* of the algorithm: one program keeps a block of queries, and the keys pass. In version 1
# the outer loop ran over keys. For each block of keys it visited all queries, so it loaded and stored their $O$, $m$ and
# $\ell$ every time. One program did this for a whole head.
#
# ![Version 1: a block of keys stays, O is read and written at each step. Version 2: a block of queries stays, O is written once.](../theory/figures/versions-orders.png)
#
# Both orders as GPU kernels with the same tiles, recorded on an H200 (heads × tokens):

# %% tags=["nbval-check-output"]
orders = load_run("loop-orders-h200").query("head_dim == 64 and not causal").iloc[[0, -1]]
for run in orders.itertuples():
    heads_in_all = run.batch * run.heads
    print(f"{heads_in_all:3} x {run.seqlen:6,} tokens:", end=" ")
    print(f"version 1 {run.version1_ms:6.2f} ms, version 2 {run.same_tiles_ms:.2f} ms")

# %% [markdown]
# With one head, version 1 leaves all but one of 132 multiprocessors idle: a factor of up to 132. The extra reads and
# writes explain the rest: with 128 heads both fill the GPU, and version 2 is still twice as fast.
# ([Chapter 5](../theory/05-from-v1-to-v4.md) explains versions 3 and 4.)
#
# ### The backward pass, with numbers
#
# Training needs $P$ again. The textbook stores it. FlashAttention stores $O$ and $L$, and *recomputes* each tile of $P$
# as $e^{S-L}$. Write $dX$ for the gradient of the loss by $X$. One query, two keys,
# head dimension 1:
#
# | | key 1 | key 2 |
# |---|---|---|
# | $P_k$ | 0.25 | 0.75 |
# | $v_k$ | 2 | 6 |
# | $dO$, from the next layer | 3 | 3 |
# | step 1: $dP_k = dO \cdot v_k$ | 6 | 18 |
# | step 2: their weighted mean, $D = \sum_k P_k\,dP_k$ | 15 | 15 |
# | step 3: $dS_k = P_k\,(dP_k - D)$ | -2.25 | 2.25 |
#
# Step 1 is the chain rule for $O = \sum_k P_k v_k$, step 3 that of the softmax: a higher score takes weight from the other
# keys, so $D$ is subtracted. Step 2 is the obstacle: its sum needs *all* keys, and a tile has only some:
#
# ![One query: the tile has two of the eight entries in its rows of P and dP, and all of its rows of O and dO.](../theory/figures/row-and-tile.png)
#
# The way out: put step 1 into step 2, and take $dO$ out of the sum.
# $D = \sum_k P_k\,(dO \cdot v_k)$ $= dO \cdot \sum_k P_k v_k$ $= dO \cdot O$, here $3 \cdot 5 = 15$. No key is left in it: every
# tile has the query's $dO$ and $O$. The same for six queries, with vectors of eight numbers:

# %% tags=["nbval-check-output"]
q, k, v, dout = torch.randn(4, 6, 8, dtype=torch.float64)
out, p = standard_attention(q, k, v)
over_the_row = (p * (dout @ v.mT)).sum(-1)
from_the_output = (dout * out).sum(-1)
print("the same D:", torch.allclose(over_the_row, from_the_output))

# %% [markdown]
# So the backward is two loops over tiles, too: write it in [backward](further/backward.ipynb).
#
# ## 1.8 · One function, many kernels
#
# Libraries differ in layout, option names and the alignment of causal masks. The lab has one function for all of them,
# with flash-attn's conventions (heads come *after* seqlen here):
#
# ```python
# attention(q, k, v, causal=False, backend="auto")   # (batch, seqlen, heads, head_dim)
# ```

# %%
q, k, v = torch.randn(3, 2, 1024, 8, 64, device=device)
out = attention(q, k, v, causal=True)
print(last_call())

# %% [markdown]
# `last_call()` shows which backend and kernel ran, and why others did not. A backend that you
# name runs, or says why it cannot.
#
# > **A common error.** "SDPA means FlashAttention." SDPA chooses among several kernels. On a CPU it uses its
# > FlashAttention kernel by default. On a GPU, with float32 or an explicit mask, you don't get FlashAttention. Hopper and
# > Blackwell GPUs (2022, 2024) try the kernel of cuDNN, NVIDIA's library, first.
#
# ### Are they equal?
#
# In exact arithmetic, yes. In floating point, sums in another order round differently. The next table compares each
# implementation with an *oracle*, the same mathematics in float64:

# %%
from labsupport.profiling import errors_by_dtype

errors_by_dtype(["standard", mine, fused], device=device)

# %% [markdown]
# From float32 to bfloat16 the error grows by three to four orders of magnitude, for the textbook as well. A loop that
# keeps $m$, $\ell$ and $O$ in the inputs' dtype has a larger error than a kernel, which keeps float32. flash-attn's
# tests have a rule, the column *allowed*: the *max error* may be at most twice the textbook's *in the same dtype*
# (three times for gradients), plus $10^{-5}$.

# %% [markdown]
# ## 1.9 · Half precision, without regret
#
# FlashAttention's GPU kernels want *one* dtype for q, k and v, and take only float16 and bfloat16. Mixed dtypes are an
# error:

# %%
q, k, v = torch.randn(3, 1, 128, 4, 64, device=device)
try:
    torch.nn.functional.scaled_dot_product_attention(q, k.bfloat16(), v)
except RuntimeError as error:
    print(type(error).__name__, "-", str(error).split(". ")[0])

# %% [markdown]
# ![Ranges of the dtypes: float16 ends at 65,504, bfloat16 reaches as far as float32.](../theory/figures/dtype-ranges.png)
#
# bfloat16 has float32's range, but its steps are eight times as coarse as float16's. (TF32: how matrix units may
# read float32.)
#
# Do the *scores* have to fit, too? Take q and k with 40 in every entry. Each score is $40 \cdot 40 \cdot 64 = 102{,}400$
# before it is scaled, beyond float16's end. Guess: in float16, how many of the 1,024 output numbers are NaN, with the
# textbook and with FlashAttention?

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
    checks.compare_prediction(f"NaN among 1,024 numbers, {name}", guess, nan)


# %% [markdown]
# Textbook attention stores the scores in float16, where they are infinite, and the softmax of infinities is NaN.
# FlashAttention keeps its tile of scores in float32, inside the kernel. So only the *inputs* have to fit.
#
# ### Exercise 1-6 · Cast for a kernel
# ●●○ · useful · 20 minutes · 5 points
#
# Cast inputs of any floating dtypes for a kernel that takes only float16 and bfloat16.
#
# | `half_dtype(q, k, v)` returns | when |
# |---|---|
# | `torch.bfloat16` | one of the three is bfloat16 already, or holds a finite number that float16 would turn into infinity: a magnitude of 65,520 or more |
# | `torch.float16` | otherwise: its steps are finer |
#
# ![The last numbers of float16: what lies below 65,520 rounds to 65,504, from 65,520 on to infinity.](../theory/figures/float16-end.png)
#
# `half_attention(q, k, v)` calls `attention` in that dtype, and returns the result in the dtype of `q`. All tensors are
# `(batch, seqlen, heads, head_dim)`. Each input gets its gradient in its own dtype.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Two reasons lead to bfloat16. Which entries do not count, because bfloat16 does not help them?
#
# <details><summary>Hint 2: the idea</summary>
#
# Ignore infinite and NaN entries, with `isfinite()`. A tensor may have no finite entry at all, and `max()` of nothing is
# an error: use `any()`. The backward of `.to(dtype)` casts the gradient back.
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


# %% nbgrader={"grade": true, "grade_id": "ex-1-6-half-precision-values", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
checks.check_half_dtype_values(half_dtype)
checks.check_half_dtype_edges(half_dtype)
checks.check_half_attention(half_attention)
### BEGIN HIDDEN TESTS
checks.check_half_dtype_values(half_dtype, seed=61)
checks.check_half_dtype_edges(half_dtype, seed=62)
checks.check_half_attention(half_attention, seed=63)
### END HIDDEN TESTS

# %% [markdown]
# The lab's own `safe_flash_attention` does this, too, and reports what was cast and how large the error is. On a CPU,
# whose kernels also take float32, `dtypes=` asks for half precision:

# %%
import warnings

from labsupport.precision import PrecisionWarning, safe_flash_attention

warnings.simplefilter("ignore", PrecisionWarning)  # its warnings: here we print instead
q, k, v = torch.randn(3, 1, 128, 4, 64, device=device)
halves = (torch.float16, torch.bfloat16)
_, report = safe_flash_attention(q, k.bfloat16(), v, dtypes=halves, return_report=True)
print(report)


# %% [markdown]
# ## 1.10 · Find the fault
#
# Here each token looks for similar tokens *at least* `gap` places before it. So if the last token
# changes, only its own output may change:
#
# ![For a gap of 3, token 3 may look at token 0, token 7 at tokens 0 to 4, and the first three tokens at none.](../theory/figures/gap-mask.png)


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
change = (recall(other, 3) - recall(x, 3)).abs().amax(dim=-1)
print("rows that changed:", change.nonzero().flatten().tolist())

# %% [markdown]
# Rows 0 to 2 must not change, but they see the future. Why exactly these rows? Would $-10^9$ be better?
#
# <details><summary>Think first, then look</summary>
#
# The first three tokens may look nowhere, so *all* their scores fall by 10,000. A softmax does not notice what is added
# to a whole row: they attend to everything. Every finite number has this fault. Use $-\infty$, and define the empty row
# as 0, as in exercise 1-1. </details>
#
# To find a leak, *change* one input and look at what else changes.
# ([Masks](further/masks.ipynb) goes on from here.)
#
# ## What you measured
#
# - Softmax can be computed block by block, exactly. So a loop saves memory; on a GPU only a fused kernel saves time.
# - To judge an implementation, compare its error with the textbook's in the same dtype.
#
# ### Three questions
#
# <details><summary>1. FlashAttention does <em>more</em> floating-point operations than the textbook, in the backward pass. Why is it faster?</summary>
#
# Recomputing $S$ costs one more matrix product, but the textbook's trips with $N \times N$ matrices take longer.
# </details>
#
# <details><summary>2. Why does the forward pass return the log-sum-exp and not m and ℓ?</summary>
#
# The backward needs only the combination: $e^{s-m}/\ell = e^{s - (m + \ln \ell)}$. </details>
#
# <details><summary>3. Your ℓ is right, but O is wrong from the second block on. What is missing?</summary>
#
# It was not rescaled by $e^{m - m'}$ when the maximum rose. </details>
#
# ### Read on
#
# - The papers, in the [references](../theory/references.md): Dao 2022, sections 2 and 3; Dao 2023, section 3.
# - For bonus points: [eight bits](further/eight-bits.ipynb).
#
# ### How far you are

# %%
from labsupport.course.progress import show_progress

show_progress("01", globals())
