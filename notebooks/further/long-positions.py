# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Longer than in training
#
# **Time** about 26 minutes. **You need** notebook 3, sections 3.1 and 3.2.
# **Exercise** 3-9, 3 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [7, Long context](../../theory/07-long-context.md#longer-than-in-training).

# %%
import torch

from labsupport import checks, plotting
from labsupport.profiling import environment_card, load_run
from labsupport.training.tasks import recall

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
environment_card()

# %% [markdown]
# RoPE itself has no last position, but each model was trained up to some length. `recall` (notebook 3, section 3.1) was trained on 2,048 bytes; only 40 of its 2,780 steps used 4,096. Now it
# reads lists of 4,096 bytes with questions everywhere. We measure the negative log-likelihood (NLL) of questions and
# answers by their position.
#
# **Predict first**: how many times as large is the NLL in the last 1,024 bytes as in the first 1,024?

# %%
predicted_rise = None  # your guess, a number

# %%
from labsupport.training.tasks.positions import nll_by_position, with_frequencies

factor, trained = 2, recall.LENGTH
finder = recall.load_recall(device)
stage = recall.Stage(1, factor * trained, documents=4, facts=30 * factor, questions=80 * factor)
(lists,) = recall.recall_batches([stage], others=0.0, first_seed=700)(0)
by_position = nll_by_position(finder, **lists).rename(columns={"nll": "plain"})
rise = by_position.plain.iloc[-1] / by_position.plain.iloc[0]
checks.compare_prediction("Last 1,024 bytes over the first", predicted_rise, rise, "times")
by_position.round(2)

# %% [markdown]
# Later answers are harder in any case, because there are more facts to choose from. From position 2,048 on there is a
# second reason. At position $t$, pair $i$ has turned by the angle $t f_i$, and `recall` has $d/2 = 8$ pairs. In 2,048
# bytes, pair 5 makes a quarter of a turn, and pair 7 a hundredth. The model saw larger angles of these pairs only in
# those 40 steps. Three remedies slow pairs down, by up to a factor $\sigma$ (here 2). They differ in which pairs they
# slow, and by how much:
#
# ```text
# pair i                           0      1      2      3      4      5      6      7
# turns in 2,048 bytes           326     77     18    4.3    1.0   0.24   0.06   0.01
#
# slowed by: interpolation         2      2      2      2      2      2      2      2
#            NTK-aware             1    1.1    1.2    1.3    1.5    1.6    1.8      2
#            YaRN                  1      1    1.1    1.3    1.6      2      2      2
# ```
#
# The figure shows a model with 32 pairs, trained on 1,024 tokens and used at 8,192:
#
# ![Turns of each of 32 pairs at the last token, four curves: at the training length of 1,024 tokens, and at 8,192 tokens with the plain frequencies, with interpolation, and with a larger base.](../../theory/figures/long-context-turns.png)
#
# ## Exercise 3-9 · Three ways to turn more slowly
# ●●○ · 20 minutes · 3 bonus points
#
# $d$ = `head_dim`, $\beta$ = `base`, $\sigma$ = `factor` (1 or more). $f_i = \beta^{-2i/d}$ are the plain frequencies,
# $i = 0 \dots d/2 - 1$. All three functions return the new frequencies, `(head_dim // 2,)`, float32 or float64; `yarn` also returns
# a second value.
#
# | function | returns |
# | --- | --- |
# | `interpolated(head_dim, base, factor)` | *position interpolation* (Chen et al. 2023) divides all positions by $\sigma$. An angle is $t f_i$, so you can divide each $f_i$ instead |
# | `ntk_aware(head_dim, base, factor)` | the plain formula with a larger base $\beta'$, chosen so that the *last* pair becomes $\sigma$ times as slow. (Pair 0 stays: its frequency is 1 with any base) |
# | `yarn(head_dim, base, factor, trained)` | a tuple: the frequencies $f'_i$ below, and the *attention factor* $0.1 \ln\sigma + 1$, a number. `trained`: the training length in tokens, $T$ |
#
# YaRN (Peng et al. 2023) leaves fast pairs alone and interpolates slow ones, with a ramp $\gamma$ in between:
#
# $$f'_i = (1 - \gamma_i) f_i + \gamma_i \frac{f_i}{\sigma}, \qquad \gamma_i = \frac{i - \text{low}}{\text{high} - \text{low}} \text{ clamped to } 0 \dots 1, \qquad c(n) = \frac d2 \cdot \frac{\ln\frac{T}{2\pi n}}{\ln\beta}$$
#
# A pair at index $c(n)$ makes $n$ turns in $T$ tokens. *low* is $c(32)$ rounded down, at least 0; *high* is $c(1)$
# rounded up. For `recall` they are 1 and 5. (The ramp is linear in $i$, as in the authors' program and in
# Transformers; the paper's formula differs.) Queries and keys are both multiplied by the attention factor, so scores
# grow by its square, and the softmax becomes sharper.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Begin with $\sigma = 1$: what must all three return? Then look at the last pair in the table above. What does each of the three do
# with it?
#
# <details><summary>Hint 2: the idea</summary>
#
# The last pair is $i = d/2 - 1$. Write down its frequency with $\beta'$ and with $\beta$. The first must be the second divided by
# $\sigma$; solve for $\beta'$. For YaRN compute *low* and *high* first and compare them with 1 and 5.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# interpolated   the plain frequencies, divided
# ntk_aware      multiply the base by factor to a power that is a little above 1;  the plain formula with this base
# yarn           the plain frequencies;  low and high by math.log, math.floor, math.ceil
#                the ramp from torch.arange(head_dim // 2), clamped;  mix plain and divided;  the attention factor
# ```
# </details>
# </details>
# </details>

# %% nbgrader={"grade": false, "grade_id": "ex-3-9-frequencies", "locked": false, "schema_version": 3, "solution": true, "task": false}
import math


def interpolated(head_dim, base, factor):
    """The frequencies, (head_dim // 2,), that divide all positions by `factor`."""
    ### BEGIN SOLUTION
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return base**-exponents / factor
    ### END SOLUTION


def ntk_aware(head_dim, base, factor):
    """The frequencies of a larger base, which makes the last pair `factor` times as slow."""
    ### BEGIN SOLUTION
    larger = base * factor ** (head_dim / (head_dim - 2))
    return larger ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    ### END SOLUTION


def yarn(head_dim, base, factor, trained):
    """YaRN's frequencies, and its attention factor."""
    ### BEGIN SOLUTION
    plain = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    ends = [math.log(trained / (2 * math.pi * n)) / math.log(base) for n in (32, 1)]
    low = max(math.floor(head_dim / 2 * ends[0]), 0)
    high = math.ceil(head_dim / 2 * ends[1])
    ramp = ((torch.arange(head_dim // 2) - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * plain + ramp * plain / factor, 0.1 * math.log(factor) + 1
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-3-9-frequencies-interpolated", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_interpolated(interpolated)
### BEGIN HIDDEN TESTS
checks.check_interpolated(interpolated, seed=91)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-9-frequencies-ntk", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_ntk_aware(ntk_aware)
### BEGIN HIDDEN TESTS
checks.check_ntk_aware(ntk_aware, seed=92)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-9-frequencies-yarn", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_yarn(yarn)
### BEGIN HIDDEN TESTS
checks.check_yarn(yarn, seed=93)
### END HIDDEN TESTS

# %% [markdown]
# Now the same weights read the same lists with your frequencies, without further training.
#
# **Predict first**: take the best method's NLL in the last 1,024 bytes, and divide it by the plain NLL in the first
# 1,024 bytes. Which number do you expect?

# %%
predicted_best = None  # your guess, a number

# %%
own_interpolated = checks.solution_or_reference(
    interpolated, checks.ex_3_9_long_positions.interpolated, checks.check_interpolated
)
own_ntk = checks.solution_or_reference(
    ntk_aware, checks.ex_3_9_long_positions.ntk_aware, checks.check_ntk_aware
)
own_yarn = checks.solution_or_reference(yarn, checks.ex_3_9_long_positions.yarn, checks.check_yarn)

# %%
shape = finder.config.head_dim, finder.config.rope_base
turned = {
    "interpolated": (own_interpolated(*shape, factor),),
    "NTK-aware": (own_ntk(*shape, factor),),
    "YaRN": own_yarn(*shape, factor, trained),
}
for name, frequencies in turned.items():  # on a CPU a few seconds
    by_position[name] = nll_by_position(with_frequencies(finder, *frequencies), **lists).nll
by_position.round(2)

# %%
best = by_position[list(turned)].iloc[-1]
ratio = best.min() / by_position.plain.iloc[0]
checks.compare_prediction(f"Best at the end, {best.idxmin()}", predicted_best, ratio, "times")

# %%
last = by_position.iloc[-1]
plotting.plot_by_window(
    by_position,
    {name: name for name in ("plain", "NTK-aware", "YaRN")},
    title=f"The last 1,024 bytes: plain {last.plain:.2f}, NTK-aware {last['NTK-aware']:.2f}, "
    f"YaRN {last.YaRN:.2f}; interpolated {last.interpolated:.1f}, off the chart",
    ylabel="NLL (nats a byte)",
    unit="bytes",
    small_print=f"recall, trained on {trained:,} bytes; the mean of 1,024 bytes before each point; "
    f"{by_position.labels.sum():,} scored bytes in 4 lists",
)

# %% [markdown]
# At $\sigma = 2$, YaRN helps most, then NTK-aware scaling, as in the paper. NTK-aware scaling is worse than plain
# frequencies in the first 3,072 bytes, because it also slows pairs that don't need it. Interpolation destroys this model:
# its first layers look 1 to 12 bytes back, and now all distances are halved. Interpolation needs further training;
# Chen et al. took 1,000 steps. The ranking depends on the length: with `factor = 4`, the lists have 8,192
# bytes, and in their last 1,024 bytes NTK-aware scaling beats YaRN. (`factor` is set before the first table; run that cell and those after it again.)
#
# SmolLM2 is larger. It has 32 pairs, and was trained on up to 8,192 tokens. In a recorded run it reads 16,384 tokens of
# Python's source:

# %%
longer = load_run("long-positions-cpu")
ways = ["plain", "NTK-aware", "YaRN", "interpolated"]
at = longer.pivot_table(index="window", columns="method", values="nll").reset_index()[
    ["window", *ways]
]
plotting.plot_by_window(
    at,
    {name: name for name in ways},
    title="At the end: " + ", ".join(f"{name} {at[name].iloc[-1]:.2f}" for name in ways),
    ylabel="NLL (nats a token)",
    small_print="recorded, CPU: SmolLM2-135M in float32, weights rounded to 4 bits; source of "
    "argparse; the mean of 2,048 tokens before each point",
)

# %% [markdown]
# Up to 10,240 tokens, plain frequencies are as good as any. From 12,288 on they fail, but NTK-aware scaling and YaRN still work,
# without a single step of training. Interpolation works, too, but its NLL is 0.9 to 1.3 nats per token above that of the
# best method at every length. (This is one file and one small model. And a low NLL does not show that the model used
# anything 16,000 tokens away; a test like that of notebook 3, section 3.1 does.) Transformers has all three, as the `rope_type`s
# `linear`, `dynamic` (whose base grows with the text) and `yarn`.
