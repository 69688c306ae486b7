# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Training in low precision
#
# **Time** about 35 minutes. **You need** notebook 2, section 2.10.
# **Exercise** 2-9, 5 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [6, Precision](../../theory/06-precision.md#mixed-precision-training).

# %%
import pandas as pd
import torch

from labsupport import checks, plotting
from labsupport.attention import flash_attention
from labsupport.profiling import environment_card

torch.manual_seed(0)
environment_card()

# %% [markdown]
# The policy of notebook 2 was for inference. A model that is *trained* in 16 bits may fail to learn, without any error.
# Here is an example: one layer of attention, which begins to learn 33 letters. It is small enough for every CPU.

# %%
from labsupport.precision import FlashAttentionConfig, PrecisionTracker, apply_precision_policy

LETTERS = torch.tensor([list(b"To be, or not to be, that is the ")])
SHARE = 32 / (15_360 * 4_096)  # our 32 tokens' share of one step


class OneLayer(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embedding = torch.nn.Embedding(128, width)
        self.position = torch.nn.Embedding(32, width)
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.Linear(width, 3 * width)
        self.head = torch.nn.Linear(width, 128)
        self.loss = torch.nn.CrossEntropyLoss()

    def logits(self, letters):
        x = self.embedding(letters) + self.position.weight
        q, k, v = self.attention(self.norm(x)).unflatten(-1, (3, 2, -1)).unbind(2)
        return self.head(self.norm(x + flash_attention(q, k, v, causal=True).flatten(2)))

    def forward(self, letters):
        return self.loss(self.logits(letters[:, :-1])[0].float(), letters[0, 1:])


def one_layer(dtype):
    torch.manual_seed(0)
    return OneLayer().to(dtype)


# %% [markdown]
# `SHARE` imitates the large steps of large models. DeepSeek-V3 was trained on 15,360 sequences of up to 4,096 tokens a
# step ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), section 4.2). The loss is a mean over all of them, so each
# part of the step contributes its own loss times its share. We compute only one of the 1.97
# million parts; Adam divides each gradient by that gradient's usual size, so a small part trains like the whole. What
# does the tracker say?

# %%
frames, trackers = {}, {}
for dtype in (torch.float32, torch.float16):
    tiny = one_layer(dtype)
    with PrecisionTracker(tiny) as trackers[dtype]:
        (tiny(LETTERS) * SHARE).backward()
    frames[dtype] = trackers[dtype].to_dataframe()
print(trackers[torch.float16].report())

# %% [markdown]
# The same gradients in float32, against the range of float16 (dotted):

# %%
trackers[torch.float32].plot()

# %% [markdown]
# ## Exercise 2-9 · Loss scaling and master weights
# ●●○ · 28 minutes · 5 bonus points
#
# ### Step 1 · What is lost, and how far away is the other end? · 8 minutes
#
# `frame` has one row for each call and each gradient. You need these columns:
#
# | column | |
# | --- | --- |
# | `pass` | "forward", or "backward" for the gradient of a call's output |
# | `largest`, `smallest` | magnitudes |
# | `zero`, `bottom`, `entries` | numbers of entries: those that are 0; those with 1 to 3 bits left in float16; all |
#
# | function | returns |
# | --- | --- |
# | `lost_share(frame)` | the share of the entries of all gradients that are 0, from 0 to 1 |
# | `largest_scale(frame)` | the largest power of 2 by which you may multiply all gradients, so that none exceeds 65,504 |
#
# <details><summary>Hint 1: a nudge</summary>
#
# Both look at some of the rows only. `frame.pass` is a syntax error, because `pass` is a word of Python.
#
# <details><summary>Hint 2: the idea</summary>
#
# `frame[condition]` selects rows, and `frame["name"]` is a column, with the methods `sum()` and `max()`. The share is a
# quotient of two sums. A power of 2 has an integer as its logarithm, and `math.floor` rounds down.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# lost_share:    of the rows of the backward pass: the sum of one column, divided by the sum of another
# largest_scale: the largest of their largest magnitudes
#                how often does it fit into 65,504?
#                the binary logarithm of that, rounded down, is the exponent
# ```
# </details></details></details>

# %%
import math


# %% nbgrader={"grade": false, "grade_id": "ex-2-9-range", "locked": false, "schema_version": 3, "solution": true, "task": false}
def lost_share(frame):
    """The share of the gradients' entries that are 0."""
    ### BEGIN SOLUTION
    gradients = frame[frame["pass"] == "backward"]
    return float(gradients["zero"].sum() / gradients["entries"].sum())
    ### END SOLUTION


def largest_scale(frame):
    """The largest power of 2 that takes no gradient beyond 65,504."""
    ### BEGIN SOLUTION
    largest = frame[frame["pass"] == "backward"]["largest"].max()
    return 2.0 ** math.floor(math.log2(65_504 / largest))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-9-range-share", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_lost_share(lost_share)
### BEGIN HIDDEN TESTS
checks.check_lost_share(lost_share, seed=91)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-9-range-scale", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_largest_scale(largest_scale)
### BEGIN HIDDEN TESTS
checks.check_largest_scale(largest_scale, seed=92)
### END HIDDEN TESTS

# %% [markdown]
# Now run your functions on the two frames. The scale comes from the float32 run: of the float16 run only the gradient of
# the loss itself is left, which is in float32. The tracker's advice was eight times smaller, so that gradients may grow.

# %%
own_share, own_scale = (
    checks.solution_or_reference(
        globals()[name], getattr(checks.ex_2_9_loss_scaling, name), getattr(checks, f"check_{name}")
    )
    for name in ("lost_share", "largest_scale")
)
for dtype, frame in frames.items():
    print(f"{dtype}: {own_share(frame):.1%} of the gradients' entries are 0")
start = own_scale(frames[torch.float32])
print(f"a loss may be multiplied by up to 2^{math.log2(start):.0f}")


# %% [markdown]
# ### Step 2 · A scale that adapts · 10 minutes
#
# Multiply the loss by a *scale*, and the chain rule multiplies all gradients by it, so that small ones are no longer
# lost. Divide them in float32, and Adam gets gradients of the original size. The best scale is as large as possible,
# and it changes during training: gradients grow and shrink, and those of weights, which the tracker does not record,
# are sums over all tokens. So find it by trying:
#
# ![Ranges of float32, TF32, bfloat16 and float16 on a logarithmic axis: float16 ends at 65,504, bfloat16 reaches as far as float32.](../../theory/figures/dtype-ranges.png)
#
# - A gradient is infinite or NaN: the scale was too large. **Skip** this step, **halve** the scale.
# - `interval` good steps in a row: **double** it.
#
# | function | returns |
# | --- | --- |
# | `unscale(gradients, scale)` | two values: a list of the gradients in float32, divided by `scale`; and `True` if all their entries are finite, otherwise `False`. `gradients` is a list of tensors in float16, bfloat16 or float32, of any shapes |
# | `next_scale(scale, good_steps, finite, interval)` | two values: the next step's scale and `good_steps`. `good_steps` counts the good steps since the scale last changed, without this one; `finite` says if this one is good |
#
# <details><summary>Hint 1: a nudge</summary>
#
# float16 divided by a Python number is float16. The step that completes the interval is itself a good one.
#
# <details><summary>Hint 2: the idea</summary>
#
# `isfinite()` is a method of tensors, and neither infinity nor NaN is finite. Python's `all` takes a list of truth
# values. `next_scale` has three cases; in two of them the count restarts at 0.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# unscale:    for each gradient: to float32 first, then divide
#             finite: for each gradient, are all entries finite? all of these together
# next_scale: not finite:                   half the scale, count 0
#             this step makes it interval:  twice the scale, count 0
#             otherwise:                    the same scale, one more
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-9-scaler", "locked": false, "schema_version": 3, "solution": true, "task": false}
def unscale(gradients, scale):
    """The gradients in float32, divided by the scale; and whether all of them are finite."""
    ### BEGIN SOLUTION
    finite = all(bool(g.isfinite().all()) for g in gradients)
    return [g.float() / scale for g in gradients], finite
    ### END SOLUTION


def next_scale(scale, good_steps, finite, interval):
    """The scale and the number of good steps after this one."""
    ### BEGIN SOLUTION
    if not finite:
        return scale / 2, 0
    if good_steps + 1 == interval:
        return scale * 2, 0
    return scale, good_steps + 1
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-9-scaler-unscale", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_unscale(unscale)
### BEGIN HIDDEN TESTS
checks.check_unscale(unscale, seed=93)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-9-scaler-next", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_next_scale(next_scale)
### BEGIN HIDDEN TESTS
checks.check_next_scale(next_scale, seed=94)
### END HIDDEN TESTS

# %% [markdown]
# ### Step 3 · Master weights · 10 minutes
#
# Even a gradient that is not lost may not change its weight. Numbers of bfloat16 between 1 and 2 are 1/128 apart: add
# 0.001 to a weight of 1, and the result is 1, in every step. So the optimizer changes *master weights* in float32, and
# the model gets a rounded copy of them.
#
# | `master_step(weights, masters, gradients, optimizer)` | one step; changes tensors in place and returns nothing |
# | --- | --- |
# | `weights` | list of the model's parameters, in float16 or bfloat16 |
# | `masters` | the optimizer's parameters: a list of tensors in float32, one of the same shape for each weight |
# | `gradients` | list of tensors in float32, as returned by `unscale` |
# | `optimizer` | a PyTorch optimizer of the masters: `step()` reads each master's `.grad` and changes the master |
#
# <details><summary>Hint 1: a nudge</summary>
#
# There are three lists of the same length, and three things to do. Never copy from the weights to the masters: the
# masters must keep what rounding removes.
#
# <details><summary>Hint 2: the idea</summary>
#
# `zip` goes through lists in parallel. `a.copy_(b)` writes b's numbers into a, rounded to a's dtype. For a parameter
# that requires gradients, PyTorch allows this only inside `with torch.no_grad():`.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# each master's .grad is its gradient
# the optimizer steps
# without gradients: each weight gets its master's numbers
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-9-masters", "locked": false, "schema_version": 3, "solution": true, "task": false}
def master_step(weights, masters, gradients, optimizer):
    """Change the masters, and round them into the model's weights."""
    ### BEGIN SOLUTION
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    optimizer.step()
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-9-masters-steps", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_master_step(master_step)
### BEGIN HIDDEN TESTS
checks.check_master_step(master_step, seed=95)
### END HIDDEN TESTS

# %% [markdown]
# Now train with your three functions. Each run has the same weights and letters. Without masters, each step loses what
# rounding removes. Guess: which of the two does *bfloat16* need, "scaling" or "masters"?

# %%
predicted_need = None  # "scaling", "masters", "both" or "neither"

# %%
own = {
    name: checks.solution_or_reference(
        globals()[name], getattr(checks.ex_2_9_loss_scaling, name), getattr(checks, f"check_{name}")
    )
    for name in ("unscale", "next_scale", "master_step")
}


def train(dtype, scaled=False, masters=True, steps=100):
    """The loss and the scale of each step."""
    tiny, scale, good, record = one_layer(dtype), start if scaled else 1.0, 0, []
    weights = list(tiny.parameters())
    wide = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.Adam(wide, lr=5e-4, fused=True)
    for _ in range(steps):
        loss = tiny(LETTERS)
        record.append((loss.item(), scale))
        gradients = torch.autograd.grad(loss * SHARE * scale, weights)
        gradients, finite = own["unscale"](gradients, scale)
        if finite:
            own["master_step"](weights, wide, gradients, optimizer)
        if scaled:
            scale, good = own["next_scale"](scale, good, finite, interval=25)
        if not masters:
            for master, weight in zip(wide, weights, strict=True):
                master.copy_(weight.detach())
    return pd.DataFrame(record, columns=["loss", "scale"])


# %%
threads = torch.get_num_threads()
torch.set_num_threads(1)  # faster for tensors this small
F16, BF16 = torch.float16, torch.bfloat16
runs = {
    "float32": train(torch.float32),
    "float16": train(F16, masters=False),
    "float16, scaling and masters": train(F16, scaled=True),
    "bfloat16": train(BF16, masters=False),
    "bfloat16, masters": train(BF16),
}
torch.set_num_threads(threads)
final = {name: run.loss.iloc[-1] for name, run in runs.items()}
assert final["float16"] > 0.99 * runs["float16"].loss[0]  # it does not fall
assert abs(final["float16, scaling and masters"] / final["float32"] - 1) < 0.01
off = pd.Series(final) / final["float32"] - 1
scales = runs["float16, scaling and masters"].scale
print(f"skipped: {int((scales.diff() < 0).sum())} of {len(scales)} steps")
pd.DataFrame({"final loss": pd.Series(final).round(3), "off float32": off.map("{:+.1%}".format)})

# %%
from labsupport.plotting.drawing import BLUE, ORANGE, PINK

figure = plotting.Chart(figsize=(7.6, 3.8))
axes = figure.subplots()
for (name, run), colour in zip(runs.items(), (BLUE, PINK, PINK, ORANGE, ORANGE), strict=True):
    repaired_run = "masters" in name
    look = (0, (4, 4)) if repaired_run else "-"
    axes.plot(run.loss, color=colour, linestyle=look, linewidth=4 - 2 * repaired_run, label=name)
axes.set(xlabel="step", ylabel="loss (nats a letter)")
axes.legend(frameon=False, fontsize=9, loc="lower left")
near = sum("masters" in name and abs(off[name]) < 0.01 for name in runs)
figure.say(
    f"{'Both' if near == 2 else f'{near} of 2'} repaired runs ended within 1% of float32; "
    f"plain float16 ended {off['float16']:.0%} above it, plain bfloat16 {off['bfloat16']:.0%}",
    "CPU, one layer, 32 letters, Adam with 5e-4",
)
figure

# %%
needs = "masters" if off["bfloat16"] > 0.05 and abs(off["bfloat16, masters"]) < 0.01 else "unclear"
print(f"bfloat16 needs: you predicted {predicted_need}, it is {needs}.")

# %% [markdown]
# - **float16** has the digits, but not the range. Without scaling, every gradient is 0, and the weights do not change.
#   With a scale it follows float32, except for the skipped steps.
# - **bfloat16** has float32's range, so it needs no scaling. But for weights from 0.25 on, a step of 0.0005 is less
#   than half of the distance between its numbers, so those updates are lost.
# - The masters cost 4 bytes a parameter, a skipped step costs a batch.
#
# In the lab's library, `apply_precision_policy` replaces the norm by `MixedPrecisionLayerNorm` (statistics in float32),
# `compute_loss` casts the logits, and `MixedPrecisionOptimizer` has the masters and PyTorch's `GradScaler`, which is
# your `next_scale` with an interval of 2,000:

# %%
from labsupport.precision import MixedPrecisionOptimizer, compute_loss

torch.set_num_threads(1)
tiny, policy = one_layer(torch.float32), FlashAttentionConfig.float16()
apply_precision_policy(tiny, policy)
optimizer = MixedPrecisionOptimizer(tiny, policy, torch.optim.Adam, lr=5e-4, init_scale=start)
for _ in range(100):
    loss = compute_loss(tiny.logits(LETTERS[:, :-1]), LETTERS[:, 1:])
    optimizer.backward(loss * SHARE)
    optimizer.step()
    optimizer.zero_grad()
torch.set_num_threads(threads)
print(
    f"{type(tiny.norm).__name__}; final loss {loss:.3f}, scale 2^{math.log2(optimizer.scale):.0f}"
)
assert abs(loss.item() / final["float32"] - 1) < 0.01

# %% [markdown]
# [Chapter 6](../../theory/06-precision.md#mixed-precision-training) has the formulas, and says how small an update may be.
# Source: P. Micikevicius et al.: *Mixed Precision Training* (2018), arXiv:1710.03740.
