# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # FlashAttention-4: fewer exponentials, fewer rescalings
#
# **Time** about 30 minutes. **You need** notebook 1 up to section 1.5.
# **Exercise** 4-7, 4 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [5, From version 1 to version 4](../../theory/05-from-v1-to-v4.md#version-4-fewer-exponentials-fewer-rescalings).

# %%
import math
import torch

from labsupport import checks, plotting
from labsupport.profiling import environment_card

torch.manual_seed(0)
environment_card()

# %% [markdown]
# On a B200 a multiprocessor does 8,192 FLOPs in a cycle, and 16 exponentials. At
# `head_dim` 128 an entry of a tile needs 512 FLOPs and one exponential, so both take equally long ([chapter
# 5](../../theory/05-from-v1-to-v4.md#version-4-fewer-exponentials-fewer-rescalings)). FlashAttention-4 computes some
# exponentials on the units for ordinary arithmetic, and skips most multiplications of $O$. While a softmax runs, tensor
# cores can wait; this was measured in the lab's kernel on an H200:
#
# ![Three timelines, measured. One consumer: tensor cores busy 44% of the time. Two consumers: each has its products while the other has its softmax, 73%. In turns: 76%](../../theory/figures/versions-timeline.png)
#
# **A power of two without an exponential.** $2^{-2.75} = 2^{-3} \cdot 2^{0.25}$: a whole power, and a fraction $f$ from 0 to 1. Look at the
# bits of float32 numbers (sign, exponent, significand) that differ by a whole power:

# %% tags=["nbval-check-output"]
for number in (2**0.25, 2**1.25, 2**-2.75):
    bits = f"{torch.tensor(number).view(torch.int32).item():032b}"
    print(f"{number:.4f} = {bits[0]} {bits[1:9]} {bits[9:]}, exponent {int(bits[1:9], 2)}")


# %% [markdown]
# The significand stays the same, and the exponent changes by the whole power. The exponent begins at bit 23, so adding
# $n$ there multiplies by $2^n$. Only $2^f$ is left, and a polynomial approximates it. This one is exact at `degree + 1`
# places, Chebyshev's nodes:


# %%
def exp2_polynomial(degree):
    """Coefficients of a polynomial near 2^f on [0, 1], the highest power first."""
    k = torch.arange(degree + 1, dtype=torch.float64)
    nodes = (1 - torch.cos(math.pi * (k + 0.5) / (degree + 1))) / 2
    return torch.linalg.solve(torch.vander(nodes), torch.exp2(nodes)).tolist()


# %% [markdown]
# **Predict first**: the weights $P$ are rounded to bfloat16 (an error of up to $2^{-8}$) before they are multiplied by
# $V$. Which degree has an error below that, and which one is below the rounding of float32, $2^{-24}$?

# %%
predicted_degrees = None  # your guess, two integers


# %% [markdown]
# ## Exercise 4-7 · Two tricks of FlashAttention-4
# ●●○ · 25 minutes · 4 bonus points
#
# ### Step 1 · Powers of two · 12 minutes
#
# | function | takes | returns |
# | --- | --- | --- |
# | `exp2_by_bits(x, coefficients)` | `x`: float32, any shape, up to 126; `coefficients`: a list of numbers, the highest power first | $2^n p(f)$, like `x`: $n$ the largest integer that is not above $x$, $f = x - n$, and $p$ the polynomial |
# | `smallest_degree(polynomials, dtype)` | a list of such lists, of degrees 1, 2, 3 ...; a `torch.dtype` | the degree of the first polynomial with a largest relative error, for $f$ from 0 to 1, of at most `torch.finfo(dtype).eps / 2`; 0 if there is none |
#
# `exp2_by_bits` calls no exponential. Hidden keys have the score -inf. If $2^x$ is below $2^{-126}$, return anything
# from 0 to $2^{-126}$. `smallest_degree` computes in float64, on about 1,000 places.
#
# <details><summary>Hint 1: a nudge</summary>
#
# What is -2.75 rounded down, and what is left? What does -inf do to both? FlashAttention-4 never lets `x` fall below
# -127.
#
# <details><summary>Hint 2: the idea</summary>
#
# `x.view(torch.int32)` reads the bits of a float32 tensor as integers, and `.view(torch.float32)` goes back. (`.to` converts the *value*.)
# Integers have `<<`. For a polynomial, Horner: begin with zeros; for each coefficient multiply by $f$, and add it.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# exp2_by_bits      keep x at -127 or above;  n: x rounded down;  f: the rest
#                   the polynomial at f, by Horner's rule
#                   its bits as an integer, plus n moved to bit 23;  at least 0;  read as float32 again
# smallest_degree   places f in float64;  for each polynomial: its ratio to the true power, less 1
#                   the first whose largest absolute value is small enough: one less than it has coefficients
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-7-exp2", "locked": false, "schema_version": 3, "solution": true, "task": false}
def exp2_by_bits(x, coefficients):
    """2^x from a polynomial and the exponent's bits, float32."""
    ### BEGIN SOLUTION
    x = x.clamp(min=-127.0)
    n = x.floor()
    f = x - n
    p = torch.zeros_like(f)
    for c in coefficients:
        p = p * f + c
    bits = p.view(torch.int32) + (n.to(torch.int32) << 23)
    return bits.clamp(min=0).view(torch.float32)  # p(0) < 1 and n = -127: below 0
    ### END SOLUTION


def smallest_degree(polynomials, dtype):
    """The first degree with an error of at most a rounding to dtype; 0 for none."""
    ### BEGIN SOLUTION
    f = torch.linspace(0, 1, 1001, dtype=torch.float64)
    for coefficients in polynomials:
        p = torch.zeros_like(f)
        for c in coefficients:
            p = p * f + c
        if (p / torch.exp2(f) - 1).abs().max() <= torch.finfo(dtype).eps / 2:
            return len(coefficients) - 1
    return 0
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-4-7-exp2-bits", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_exp2_bits(exp2_by_bits)
### BEGIN HIDDEN TESTS
checks.check_exp2_bits(exp2_by_bits, seed=71)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-7-exp2-degree", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_smallest_degree(smallest_degree)
### BEGIN HIDDEN TESTS
checks.check_smallest_degree(smallest_degree, seed=72)
### END HIDDEN TESTS

# %% [markdown]
# Now use your exponential in a softmax with 256 queries and 1,024 keys, where $P$ is rounded to bfloat16. How large is
# the output's error for each degree?

# %% tags=["nbval-check-output"]
own_exp2 = checks.solution_or_reference(
    exp2_by_bits, checks.ex_4_7_two_tricks.exp2_by_bits, checks.check_exp2_bits
)
own_degree = checks.solution_or_reference(
    smallest_degree, checks.ex_4_7_two_tricks.smallest_degree, checks.check_smallest_degree
)
polynomials = [exp2_polynomial(degree) for degree in range(1, 9)]
names = ("bfloat16", "float16", "float32")
degrees = {name: own_degree(polynomials, getattr(torch, name)) for name in names}
print("below the rounding, from degree:", degrees, "  you predicted:", predicted_degrees)

generator = torch.Generator().manual_seed(0)
s = math.log2(math.e) * torch.randn(256, 1024, generator=generator)
some_v = torch.randn(1024, 64, generator=generator)
exact = (math.log(2) * s.double()).softmax(-1) @ some_v.double()
below = s - s.amax(-1, keepdim=True)
powers = {f"degree {d}": own_exp2(below, polynomials[d - 1]) for d in (1, 2, 3, 4)}
for name, p in {**powers, "exp2": torch.exp2(below)}.items():
    output = (p.bfloat16().float() @ some_v) / p.sum(-1, keepdim=True)
    print(f"{name:8} output {((output - exact).norm() / exact.norm()).item():.1%} off")

# %%
f = torch.linspace(0, 1, 400)
figure = plotting.Chart(figsize=(7.2, 3))
axes = figure.subplots()
for degree in (1, 2, 3, 4):
    off = (own_exp2(f, polynomials[degree - 1]) / torch.exp2(f) - 1).abs()
    axes.semilogy(f, off.clamp(min=1e-8), label=f"degree {degree}")
axes.axhline(2**-8, color="black", linestyle=":", label="rounding to bfloat16")
axes.set(xlabel="f", ylabel="relative error of $2^f$")
axes.legend(ncols=3, fontsize=8)
figure.headline(
    f"From degree {degrees['bfloat16']} on, the error is below bfloat16's rounding",
    "by exp2_by_bits, 400 places",
)
figure


# %% [markdown]
# Degree 2 is just below bfloat16's rounding, so the two errors add up. Degree 3 is 40 times below, and the output is as
# good as with the true power. FlashAttention-4 uses degree 3. float32 itself would need degree 6, with twice the
# arithmetic. (The package moves only a part of a tile's exponentials, because the units for arithmetic have other
# work.)
#
# **Rescaling less often.** Softmax is a quotient. Divide weights and sum by *any* reference $2^r$ that a row uses for
# all its keys, and the quotient stays the same:
#
# $$O_i = \frac{\sum_j 2^{s_{ij} - r_i}\, V_j}{\sum_j 2^{s_{ij} - r_i}}$$
#
# The running maximum is the safest reference, since no weight exceeds 1. In FlashAttention-4 $r$ changes only if the
# maximum has risen by *more* than 8. Until then weights reach at most $2^8 = 256$. For example, take tiles of scores
# (0, 1), (3, 1) and (12, 0). First $r = 1$. The score 3 is 2 above it, so $r$ stays, and the weights are $2^2$ and
# $2^0$. The score 12 is 11 above it, so $r = 12$, and all older terms shrink by $2^{1 - 12}$.
#
# ### Step 2 · A reference that lags · 13 minutes
#
# `lazy_update(r, l, o, s, v, threshold) -> (r, l, o, rescaled)` takes one tile of keys into the running result:
#
# | | shape | |
# | --- | --- | --- |
# | `r`, `l` | `(rows,)` | the reference and the sum of weights; -inf and 0 while a row has seen no key |
# | `o` | `(rows, head_dim)` | the sum of weights times values, *not* divided by `l` |
# | `s` | `(rows, keys)` | scores in powers of two (multiplied by $\log_2 e$ already); -inf hides a key |
# | `v` | `(keys, head_dim)` | values |
# | `threshold` | a number | where the largest score of the row is more than this above `r`, `r` becomes that score; elsewhere `r` stays |
# | `rescaled` | `(rows,)`, bool | where `r` moved, and there was something to rescale: not at a row's first keys |
#
# Each row decides separately. A row that has seen no key keeps -inf, 0 and zeros.
#
# <details><summary>Hint 1: a nudge</summary>
#
# It is the update of exercise 4-3, step 3, with another choice of the new reference. If the reference stays, what is
# the factor of the old terms?
#
# <details><summary>Hint 2: the idea</summary>
#
# `torch.where(condition, a, b)` chooses row by row. After the choice, continue as before: factor, weights, `l`, `o`.
# What is -inf minus -inf, and which comparison does NaN pass? Only the subtraction needs care: subtract 0 where the new
# reference is -inf.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# highest   the row's largest score in this tile
# moves     highest is more than threshold above r
# new r     highest where it moves, the old r elsewhere
# factor    2^(old r - new r)        weights   2^(s - new r), row by row
# l, o      times factor, plus what the tile adds
# rescaled  moves, and the old r was finite
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-7-lazy", "locked": false, "schema_version": 3, "solution": true, "task": false}
def lazy_update(r, l, o, s, v, threshold):
    """One tile of keys into the running result; which rows were rescaled."""
    ### BEGIN SOLUTION
    top = s.amax(dim=-1)
    rises = top - r > threshold  # False for NaN: no key so far, none in this tile
    new = torch.where(rises, top, r)
    safe = new.masked_fill(new == -torch.inf, 0.0)
    alpha = torch.exp2(r - safe)
    p = torch.exp2(s - safe[:, None])
    l = l * alpha + p.sum(dim=-1)
    o = o * alpha[:, None] + p @ v
    return new, l, o, rises & (r > -torch.inf)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-4-7-lazy-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_lazy_update(lazy_update)
### BEGIN HIDDEN TESTS
checks.check_lazy_update(lazy_update, seed=73)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-7-lazy-edges", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_lazy_edges(lazy_update)
### BEGIN HIDDEN TESTS
checks.check_lazy_edges(lazy_update, seed=74)
### END HIDDEN TESTS

# %% [markdown]
# Now count rescalings. 512 queries meet 4,096 keys in 64 tiles. A *warp* is 32 rows here, and may skip a rescaling only
# if none of its rows needs it. There are three kinds of scores: random ones, random ones that are 8 times as large, and
# rising ones, where each tile's scores are 2 above those of the tile before. **Predict first**: in how many of the 63
# tiles after the first is a *row* of random scores rescaled, without a threshold and with 8? And a row of rising ones?

# %%
predicted_rescalings = None  # your guess: four numbers

# %%
own_update = checks.solution_or_reference(
    lazy_update,
    checks.ex_4_7_two_tricks.lazy_update,
    checks.check_lazy_update,
    checks.check_lazy_edges,
)


def count_rescalings(s, v, threshold, tile=64):
    """The output, and in which tiles after the first each row was rescaled, (rows, tiles)."""
    rows, keys = s.shape
    r, l, o = torch.full((rows,), -torch.inf), torch.zeros(rows), torch.zeros(rows, v.shape[1])
    marks = []
    for start in range(0, keys, tile):
        these = slice(start, start + tile)
        r, l, o, rescaled = own_update(r, l, o, s[:, these], v[these], threshold)
        marks.append(rescaled)
    return o / l[:, None], torch.stack(marks[1:], dim=-1)


# %% tags=["nbval-check-output"]
random_s = math.log2(math.e) * torch.randn(512, 4096, generator=generator)
v2 = torch.randn(4096, 32, generator=generator)
scores = {
    "random": random_s,
    "8 times as large": 8 * random_s,
    "rising": random_s + 2 * (torch.arange(4096) // 64),
}
print("you predicted:", predicted_rescalings)
print("rescalings in 63 tiles              a row   a warp")
counted = {}
for name, s in scores.items():
    exact = (math.log(2) * s.double()).softmax(-1) @ v2.double()
    for threshold in (0, 8, 1000):
        output, rows = count_rescalings(s, v2, threshold)
        warps = counted[f"{name}, threshold {threshold}"] = rows.view(16, 32, 63).any(dim=1)
        a_row, a_warp = (marks.sum() / len(marks) for marks in (rows, warps))
        close = "exact" if torch.allclose(output.double(), exact, atol=1e-5) else "WRONG"
        print(f"{name:17} threshold {threshold:4} {a_row:9.1f} {a_warp:8.1f}   {close}")

# %%
shown_counts = {name: marks for name, marks in counted.items() if "1000" not in name}
plain, lazy = (shown_counts[f"random, threshold {t}"].float().mean() for t in (0, 8))
plotting.plot_rescalings(
    shown_counts,
    title=f"Random scores: {plain:.0%} of tiles rescaled without a threshold, {lazy:.0%} with 8",
    small_print="counted with lazy_update: 512 queries in 16 warps, 63 tiles of 64 keys",
)

# %% [markdown]
# Without a threshold a row's maximum rises less than four times, but a warp rescales in two tiles of three, because
# nearly always one of its 32 rows needs it. With 8, random scores of the usual size never need it; those 8 times as large need it
# once a row. Rising scores need it often. Each rescaling raises $r$ by *more* than 8. So a row has fewer of them than an eighth of its maximum's whole rise: here 13 instead of 62.
# But the rows of a warp soon rescale in different tiles, so the warp gains little. In this order the threshold helps
# little; in a random one it saves every rescaling, or half of a warp's if scores are large.
#
# The outputs are exact, because `o` and `l` use the same $r$ when one is divided by the other. No step needs the true
# maximum. The log-sum-exp is $r + \log_2 l$, with that same $r$. There is one exception, the threshold of 1000: a
# reference that never changes
# lets the weights grow until float32 overflows, at $2^{128}$. In float16 that would be $2^{16}$. FlashAttention-4 uses
# 8 for 16-bit inputs, and 0 for 8-bit ones.
