# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Eight bits, and outliers
#
# **Time** about 25 minutes. **You need** exercises 1-3 and 1-4 of notebook 1.
# **Exercise** 1-7, 4 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [6, Precision](../../theory/06-precision.md#eight-bits).

# %%
import math
import torch

from labsupport import checks
from labsupport.profiling import environment_card

torch.manual_seed(0)
environment_card()

# %% [markdown]
# Hopper and later GPUs multiply 8-bit floats, *FP8*, twice as fast as 16-bit floats, and flash-attn 3 has a forward
# pass for them. Queries and keys use the format e4m3: a sign, 4 bits of exponent, 3 of significand. It rounds numbers
# like this:

# %% tags=["nbval-check-output"]
for number in (1.0, 1.06, 1.07, 300.0, 448.0, 0.001):
    rounded = torch.tensor(number).to(torch.float8_e4m3fn).float().item()
    print(f"{number:8} becomes {rounded}")


# %% [markdown]
# Rounding changes a number by up to 6%, and a number below $2^{-6}$ by more. The range ends at 448. So you divide a
# tensor by a *scale* first, and multiply by it afterwards.
#
# ![The positive numbers of FP8 and of int8 up to 448: FP8's lie close together near 1 and far apart near 448, those of int8 at equal distances.](../../theory/figures/fp8-steps.png)
#
# Which numbers should share a scale?

# %% [markdown]
# ## Exercise 1-7 · FP8 with scales, and a rotation
# ●●○ · 20 minutes · 4 bonus points
#
# ### Step 1 · Scales · 10 minutes
#
# | `round_to_fp8(x, block=None)` | | |
# | --- | --- | --- |
# | `x` | `(..., seqlen, head_dim)`, float32 | queries or keys |
# | `block` | integer, or `None` | the number of rows of one head that share a scale; the last block may be shorter. `None`: one scale for the whole tensor |
# | returns | like `x`, float32 | `x` rounded to `torch.float8_e4m3fn`, and scaled back |
#
# Choose each scale so that the largest absolute value of its block (or of the tensor) becomes 448. Zeros stay zeros,
# even if a whole block is zero.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Over which dimensions do you take the largest absolute value: without a block, and with one?
#
# <details><summary>Hint 2: the idea</summary>
#
# `split(block, dim=-2)` cuts rows into blocks, and `amax` with a tuple of dimensions and `keepdim=True` gives each head its
# largest value. A cast to `torch.float8_e4m3fn` rounds; cast back to float32 after it.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# without block: all of x is the only block, and the largest value is taken over everything
# for each block of rows:
#     scale = the largest absolute value over 448; where that is 0: 1
#     divide by scale, cast to FP8, cast back, multiply by scale
# put the blocks together again, along the rows
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-7-fp8", "locked": false, "schema_version": 3, "solution": true, "task": false}
def round_to_fp8(x, block=None):
    """x, rounded to e4m3 with one scale, or one for each block of rows of each head."""
    ### BEGIN SOLUTION
    dims = tuple(range(x.ndim)) if block is None else (-2, -1)
    rounded = []
    for part in x.split(block or x.shape[-2], dim=-2):
        largest = part.abs().amax(dims, keepdim=True)
        scale = torch.where(largest == 0, 1.0, largest / 448)
        rounded.append((part / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale)
    return torch.cat(rounded, dim=-2)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-7-fp8-tensor", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_fp8_tensor(round_to_fp8)
### BEGIN HIDDEN TESTS
checks.check_fp8_tensor(round_to_fp8, seed=71)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-7-fp8-blocks", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_fp8_blocks(round_to_fp8)
### BEGIN HIDDEN TESTS
checks.check_fp8_blocks(round_to_fp8, seed=72)
### END HIDDEN TESTS

# %% [markdown]
# ### Step 2 · A rotation · 10 minutes
#
# In real models some *channels* (columns of $Q$ and $K$) are far larger than the others. For any orthogonal matrix
# $R$, $(QR)(KR)^\top = Q R R^\top K^\top = QK^\top$. So the scores stay the same if you rotate queries and keys
# alike. A good $R$ mixes every column into all others. flash-attn 3 multiplies by random signs, then by a *Hadamard
# matrix*, whose entries all have the same size:
#
# $$H_1 = (1), \qquad H_{2n} = \begin{pmatrix} H_n & H_n \\ H_n & -H_n \end{pmatrix}, \qquad R = \operatorname{diag}(\text{signs})\; \tfrac{1}{\sqrt n} H_n$$
#
# ![The 64 channels of one query: as it is, two are far larger than the rest; turned, all are of similar size, and the length is the same.](../../theory/figures/outliers-turned.png)
#
# | function | takes | returns |
# | --- | --- | --- |
# | `hadamard(n)` | `n`: a power of two | $H_n / \sqrt n$, `(n, n)`, float32 |
# | `rotate(q, k, signs)` | `q`, `k`: `(..., seqlen, head_dim)`; `signs`: `(head_dim,)`, of +1 and −1 | $QR$ and $KR$ |
#
# <details><summary>Hint 1: a nudge</summary>
#
# How often does the matrix double until it has $n$ rows? And what does a diagonal matrix on the right do to the columns of $Q$?
#
# <details><summary>Hint 2: the idea</summary>
#
# `torch.cat` puts matrices side by side (`dim=1`) or below each other (`dim=0`). Multiply by `signs` to flip the columns, then
# by the matrix.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# hadamard: begin with a 1 x 1 matrix of 1
#           while it has fewer than n rows: four copies of it, the lower right one negative
#           divide by the square root of n
# rotate:   flip the columns of both, then multiply both by the matrix, from the right
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-1-7-fp8-rotation", "locked": false, "schema_version": 3, "solution": true, "task": false}
def hadamard(n):
    """The orthogonal Hadamard matrix of n rows."""
    ### BEGIN SOLUTION
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(n)
    ### END SOLUTION


def rotate(q, k, signs):
    """Queries and keys, rotated by the same matrix."""
    ### BEGIN SOLUTION
    h = hadamard(q.shape[-1]).to(q.dtype)
    return q * signs @ h, k * signs @ h
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-1-7-fp8-rotation-matrix", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_hadamard(hadamard)
### BEGIN HIDDEN TESTS
checks.check_hadamard(hadamard, seed=73)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-7-fp8-rotation-scores", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_rotation(rotate)
### BEGIN HIDDEN TESTS
checks.check_rotation(rotate, seed=74)
### END HIDDEN TESTS

# %% [markdown]
# Now measure, with two of 64 channels ten times as large as the rest. Which helps more: a scale for each block of 64 rows, or the
# rotation?

# %%
predicted_better = None  # your guess, "blocks" or "rotation"

# %% tags=["nbval-check-output"]
import pandas as pd

own_fp8 = checks.solution_or_reference(
    round_to_fp8, checks.ex_1_7_fp8.round_to_fp8, checks.check_fp8_tensor, checks.check_fp8_blocks
)
own_rotate = checks.solution_or_reference(rotate, checks.ex_1_7_fp8.rotate, checks.check_rotation)
generator = torch.Generator().manual_seed(0)
signs = torch.randn(64, generator=generator).sign()
fp8_errors = {}
for name, size in (("no outliers", 1.0), ("two channels, 10 times as large", 10.0)):
    q, k = torch.randn(2, 4, 256, 64, generator=generator)
    q[..., [3, 40]] *= size
    k[..., [3, 40]] *= size
    turned = own_rotate(q, k, signs)
    fp8_errors[name] = {
        way: (
            (own_fp8(a, block) @ own_fp8(b, block).mT - q @ k.mT).norm() / (q @ k.mT).norm()
        ).item()
        for way, (a, b), block in (
            ("one scale", (q, k), None),
            ("blocks", (q, k), 64),
            ("rotation", turned, None),
            ("both", turned, 64),
        )
    }
print("you predicted:", predicted_better)
print(pd.DataFrame(fp8_errors).T.map("{:.1%}".format).to_string())

# %% [markdown]
# Without outliers, you need neither method. With outliers, the rotation divides the error of the scores by four, and
# blocks have almost no effect. The reason: e4m3 is a *floating-point* format, in which a number changes by up to 6%
# with any scale that keeps it in the range. (In int8 blocks would help, because its steps have the same width
# everywhere.) Two products of outliers dominate a score, and their rounding errors dominate its error. After the
# rotation the same score is a sum of 64 products of similar size, and their errors average out.
#
# flash-attn 3 uses both ideas ([chapter 5](../../theory/05-from-v1-to-v4.md#version-3-nobody-waits)). Blocks help if the
# *range* is too small, for example if one token is 100,000 times as large as the others ([chapter
# 6](../../theory/06-precision.md#eight-bits)).
