# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The backward pass, by recomputation
#
# **Time**, estimated: about 60 minutes. **You need** notebook 1 up to section 1.7.
# **Exercise** 1-5, 6 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [3, Forward and backward](../../theory/03-forward-and-backward.md#the-backward-pass-from-do-to-ds).

# %%
import math

import torch

from labsupport import checks, plotting
from labsupport.profiling import environment_card

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
environment_card()


# %% [markdown]
# The backward pass needs $P$ again. The textbook stores it in the forward pass. FlashAttention stores only $L$, the
# log-sum-exp of each row, and computes each tile of $P$ from it: $P_{ij} = e^{S_{ij} - L_i}$. With the gradient $dO$ of
# the output, and $\circ$ for the product entry by entry:
#
# $$
# dV = P^\top dO, \qquad dP = dO\, V^\top, \qquad
# dS = P \circ (dP - D), \qquad dQ = \tfrac{1}{\sqrt d}\, dS\, K, \qquad dK = \tfrac{1}{\sqrt d}\, dS^\top Q
# $$
#
# $D$ comes from the derivative of a softmax row, $ds_j = p_j \bigl(dp_j - \sum_k p_k\, dp_k\bigr)$. So $D$ is a column,
# one number for each query: $D_i = \sum_k P_{ik}\, dP_{ik}$.
#
# ![Left, the forward pass: one block of queries meets all blocks of keys, row by row. Right, the backward pass: one block of keys meets all blocks of queries.](../../theory/figures/loop-order.png)
#
# The right half is the loop: one program keeps $dK$ and $dV$ of one block of keys, and all programs add to $dQ$.
#
# > **A common error.** "The backward costs twice the forward." It does five matrix products ($QK^\top$ again, and four
# > above), the forward does two: 2.5 times the FLOPs.
#
# ![Matrix products of a training step, and measured times on an H200: FlashAttention does seven products instead of six, and is still several times as fast.](../../theory/figures/products-and-time.png)

# %% [markdown]
# ## Exercise 1-5 · The backward, by recomputation, in three steps
# ●●● · useful · 50 minutes · 6 bonus points
#
# You extend one function in three steps. In step 2 you also write a small second function.
#
# | `my_flash_backward` | shape | |
# |---|---|---|
# | `dout`, `out` | `(..., seqlen_q, head_dim)` | gradient of the output, and the output |
# | `q` | `(..., seqlen_q, head_dim)` | queries |
# | `k`, `v` | `(..., seqlen_k, head_dim)` | keys and values |
# | `lse` | `(..., seqlen_q)` | $L$, from the forward pass; `-inf` for a query that sees no key |
# | `is_causal` | bool | step 3: if true, query `i` sees keys up to `i + seqlen_k - seqlen_q` |
# | `block_q`, `block_k` | integers | rows and columns of a tile; the last tile may be smaller |
# | returns `dq`, `dk`, `dv` | as `q`, `k`, `v` | |
#
# Use PyTorch operations, and no tensor of `seqlen_q` × `seqlen_k`, not even a mask. A query that sees no key contributes
# nothing.
#
# ### Step 1 · P again, and dV · 18 minutes, 1 point
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
# ### Step 2 · D, and with it dS · 12 minutes, 1 point
#
# The sum $D_i = \sum_k P_{ik}\, dP_{ik}$ runs over a whole row, and a tile has only a part of the row:
#
# ![One query: the tile has two of the eight entries in its rows of P and dP, and all of its rows of O and dO.](../../theory/figures/row-and-tile.png)
#
# Section 1.7 of notebook 1 says how to compute $D$ without the row. Write $dS$ of one tile.
#
# | `score_gradient` | shape | |
# |---|---|---|
# | `p` | `(..., rows, cols)` | one tile of $P$ |
# | `dout`, `out` | `(..., rows, head_dim)` | the tile's rows of $dO$ and $O$ |
# | `v` | `(..., cols, head_dim)` | the tile's rows of $V$ |
# | returns `ds` | `(..., rows, cols)` | $P \circ (dP - D)$ |
#
# <details><summary>Hint 1: a nudge</summary>
#
# $dP_{ik}$ is the product of row $i$ of $dO$ with row $k$ of $V$. In the sum over $k$, what does not depend on $k$?
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
# ### Step 3 · dQ and dK, and the mask · 20 minutes, 4 points
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

# %% nbgrader={"grade": true, "grade_id": "ex-1-5-backward-values", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_backward_values(my_flash_backward)
checks.check_backward_edges(my_flash_backward)
### BEGIN HIDDEN TESTS
checks.check_backward_values(my_flash_backward, seed=51)
checks.check_backward_edges(my_flash_backward, seed=52)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-5-backward-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_backward_memory(my_flash_backward)

# %% [markdown]
# ## It trains
#
# The two passes together make a `torch.autograd.Function`. The next cell takes your functions if they pass their checks
# (the forward pass from your saved notebook 1), otherwise the lab's.

# %%
from labsupport.attention.flash_torch import flash_attention_backward, flash_attention_forward
from labsupport.course.own import solution_of

forward = checks.solution_or_reference(
    solution_of("1-4", "my_flash_forward"),
    lambda q, k, v, c, bq, bk: flash_attention_forward(q, k, v, c, block_q=bq, block_k=bk),
    checks.check_forward_values,
    checks.check_forward_edges,
)
backward = checks.solution_or_reference(
    my_flash_backward,
    lambda *args: flash_attention_backward(*args[:7], block_q=args[7], block_k=args[8]),
    checks.check_backward_values,
    checks.check_backward_edges,
)


# %%
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


# %% [markdown]
# `gradcheck` compares gradients with finite differences. What does the forward pass store for the backward?

# %% tags=["nbval-check-output"]
inputs = [torch.randn(2, 20, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
for is_causal in (False, True):
    right = torch.autograd.gradcheck(
        lambda *qkv, causal=is_causal: MyFlashAttention.apply(*qkv, causal, 16),
        inputs,
        fast_mode=True,
    )
    print(f"causal {is_causal}: gradients equal finite differences: {right}")
out = MyFlashAttention.apply(*inputs, True, 16)
print("stored for the backward:", [tuple(t.shape) for t in out.grad_fn.saved_tensors])

# %% [markdown]
# Q, K, V, O and one number for each row are stored, but no matrix of 20 × 20. Now compare training: forward and backward
# together, for the textbook (`standard`), your two loops (`mine`), and PyTorch's kernel. Guess: at 512 tokens, how many
# times as fast as the textbook is the kernel? (Less than 1 means slower.)

# %%
predicted_small = None  # your guess, a number, before you run the next cell

# %%
from labsupport.attention import available_backends, register_backend
from labsupport.profiling import grid, run_grid, speedup

mine = "flash_torch"  # the lab's two loops, until both of yours are right
if backward is my_flash_backward and forward.__name__ == "my_flash_forward":
    mine = "mine"
    register_backend(mine, lambda q, k, v, causal: MyFlashAttention.apply(q, k, v, causal, 256))
here = [s.name for s in available_backends(device=device) if s.runs]
fused = "sdpa_flash" if "sdpa_flash" in here else "sdpa_efficient"
heads, dtype = (16, torch.float16) if device.type == "cuda" else (4, torch.float32)
if device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
    dtype = torch.bfloat16
cases = grid(
    ["standard", mine, fused],
    [512, 1024, 2048],
    heads=heads,
    head_dim=64,
    dtype=str(dtype).removeprefix("torch."),
    direction="forward+backward",
)
training = run_grid(cases, device=device, max_seconds=0.2, measure_error=False)
training = speedup(training, over="standard").set_index(["seqlen", "backend"])
small = training.speedup[512, fused]
checks.compare_prediction("Forward and backward, 512 tokens", predicted_small, small, "times")
saved = training.peak_memory_bytes[2048, "standard"] / training.peak_memory_bytes[2048, mine]
plotting.plot_memory(
    training.reset_index(),
    title=f"In training at 2,048 tokens, {mine} needs 1/{saved:.0f} of the textbook's memory",
)

# %% [markdown]
# On short sequences the recomputation may cost more than it saves: "FlashAttention is always faster" is a common error.
# The lab's own class is `FlashAttentionFunction` in `labsupport/attention/flash_torch.py`. Further reading: appendix B
# of Dao 2022 derives the backward ([references](../../theory/references.md)). In [a ring's backward](ring-backward.ipynb)
# the blocks of keys are on different devices.
