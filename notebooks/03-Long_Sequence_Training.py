# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 · Training on long sequences
#
# ![GPU memory of a training step of GPT-2 small's shape against tokens, from 1K to 1M, both logarithmic: standard attention rises four-fold for each doubling and crosses 16 GiB near 6K; FlashAttention is a straight line through 16 GiB near 16K; with the loss in chunks, checkpointing and the MLP in chunks the crossing moves beyond 200K, with a 16-bit stream beyond 400K, and with host memory beyond a million; measured steps, as dots, lie on the lines. On the right, parts of the step at 128K tokens](../theory/figures/long-context-memory.png)
#
# The same model in the same 16 GiB takes 3,072 tokens at first, in float32, and a million in the end. In this
# notebook you write what makes the difference.
#
# **After this notebook you can**
#
# - show, with a real model and a real text, when a longer context helps and when it does not;
# - rotate queries and keys by their positions (RoPE), and recognise which of its two conventions a checkpoint uses;
# - say what fills the memory in a training step, and predict the longest sequence that fits;
# - fit longer sequences with a loss in chunks, checkpointing and an MLP in chunks, and say what each costs;
# - pack documents into one sequence so that they do not see each other;
# - stop a training run and resume it exactly, and judge whether FlashAttention changed the training;
# - in part two: spread one sequence, or one model, over several devices, and know what that costs.
#
# **Time** part one about 70 minutes, 47 of them for exercises; part two about 59, with exercises of 29. **You need** notebooks 1 and 2. A laptop is enough: on a CPU you train at 8,192
# tokens, and two processes stand for two devices. Each section is marked *core* or *further (optional)*; the core of
# both parts fits an afternoon.
#
# **Background**: theory chapters [7, Long context](../theory/07-long-context.md), for part one, and [11, Several
# devices](../theory/11-several-devices.md), for part two. The [glossary](../theory/glossary.md) defines the terms.
#
# **How to work.** As before: run the cells in order, write your guesses down, and let the checks tell you which mistake
# you made. Later cells run your functions.

# %%
import tempfile
import textwrap

import pandas as pd
import torch

from labsupport import checks, models, plotting, training
from labsupport.attention import attention_varlen
from labsupport.attention.rotary import apply_rotary_emb, permute_rotary_rows
from labsupport.attention.rotary import rotary_angles as labs_angles
from labsupport.profiling import environment_card, load_run, measure_peak_memory
from labsupport.training import DecoderConfig, MemoryOptions, TrainConfig, consistency
from labsupport.training.measure import MemoryStrategy, exponent, measure_training, readable
from labsupport.training.tasks import recall, recall_scores, windows

torch.manual_seed(0)
environment_card()

# %%
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
gpu = device.type == "cuda"

# %% [markdown]
# ## 3.1 · Why longer?
#
# *Core.* FlashAttention made long contexts affordable. What are they good for? SmolLM2, from notebook 2, reads a file
# of source code that contains a passage of 128 tokens from another file twice, 1,024 tokens apart. How well does the
# model predict the second occurrence if it sees the last 256, 896 or 1,024 tokens before it? (*NLL*, the negative
# log-likelihood, is in nats a token. Guessing blindly among 49,152 tokens costs 10.8.)
#
# **Predict first**: how many times smaller is the NLL once the window reaches the first occurrence?

# %%
predicted_fall = None  # your guess, a number

# %%
smollm2 = models.load_model("smollm2", dtype=torch.float32, device=device)
passage = models.source_text("heapq")
repeat = windows.with_repeat(
    smollm2.tokenizer, models.source_text("argparse"), passage[passage.index("def merge(") :]
)
by_window = windows.nll_by_window(
    smollm2.model, repeat.ids, repeat.target, [256, 896, repeat.distance]
)
fall = by_window.nll.iloc[0] / by_window.nll.iloc[-1]
checks.compare_prediction("Fall of the NLL", predicted_fall, fall, "times")
by_window.drop(columns="seen").round(2)

# %% [markdown]
# The NLL hardly changes until the window reaches the first occurrence; then the model *copies* it. What happens without
# a planted repetition? The next cell shows the same model in three real files, on the 64 tokens after position 4,096,
# from a recorded run. One of the files contains a repetition. Can you tell which, and how far back?

# %%
context = load_run("context-cpu")
plain = context[
    (context.task == "windows") & (context.measure == "nll") & (context.text != "repeat")
]
by_text = plain.pivot_table(index="window", columns="text", values="value").reset_index()
plotting.plot_by_window(
    by_text,
    {name: f"{name}.py" for name in by_text.columns[1:]},
    title="64 tokens of three real files, by the context that the model sees",
    ylabel="NLL (nats a token)",
    small_print="recorded: SmolLM2 on a CPU, the tokens after position 4,096",
)


# %% [markdown]
# Two files gain almost nothing: code mostly needs what is near. (configparser has nearly the same method twice, 561
# tokens apart: a window of 512 just misses it.) Long contexts pay where something *far away is needed again*: a
# definition, a name, who said what. Section 3.9 measures that.

# %% [markdown]
# ## 3.2 · A position for every token
#
# *Core.* Attention sees a set: without positions, "dog bites man" and "man bites dog" are the same. GPT-2 *learned* a
# vector for each of 1,024 positions, and has none for the 1,025th. *Rotary position embedding*, RoPE, needs no table
# and has no last position: it rotates each query and each key by angles that grow with the position. The dot product of
# two rotated vectors depends only on the angle *between* them, so a score depends on how far apart two tokens are.

# %% [markdown]
# ### Exercise 3-1 · Turn by position
# ●●○ · 12 minutes · 5 points
#
# At position $t$, pair $i$ of a head, $i = 0 \dots d/2 - 1$ with $d$ = `head_dim`, turns by the angle $t \cdot f_i$, in
# radians:
#
# $$f_i = \text{base}^{-2i/d}, \qquad x' = x\cos(t f_i) - y\sin(t f_i), \qquad y' = y\cos(t f_i) + x\sin(t f_i)$$
#
# | function | takes | returns |
# | --- | --- | --- |
# | `rotary_angles(positions, head_dim, base=10_000.0)` | `positions`: `(seqlen,)` int64, any values | cosines and sines of $t f_i$: `(seqlen, head_dim // 2)` each, float32 |
# | `apply_rope(x, cos, sin)` | `x`: `(batch, seqlen, heads, head_dim)`, float32 or bfloat16; `cos`, `sin` as above | a new tensor of `x`'s shape and dtype, computed in float32 |
# | `pairs_to_halves(weight, heads)` | `weight`: `(heads * head_dim, width)`, a query or key projection made for *neighbours* | a new weight of the same shape, for *halves* |
#
# There are two conventions for which two numbers of a head form a pair $(x, y)$. With *halves* (Transformers), number
# $i$ belongs to number $i + d/2$. With *neighbours* (the RoFormer paper, llama2.c), number $2i$ belongs to number
# $2i + 1$. `apply_rope` works with halves, so the rows of a model made for neighbours must be reordered: in a head of
# eight, rows `0 1 2 3 4 5 6 7` become `0 2 4 6 1 3 5 7`. That is `pairs_to_halves`.
#
# ![A head of eight numbers. Halves: 0 belongs to 4, 1 to 5, 2 to 6, 3 to 7. Neighbours: 0 belongs to 1, 2 to 3, 4 to 5, 6 to 7. Each pair has its own frequency.](../theory/figures/rotary-pairs.png)
#
# <details><summary>Hint 1: a nudge</summary>
#
# Take one pair at one position, with paper and pencil: $d = 2$, so $f = 1$. Then a head of eight: which number is the partner of
# number 1, with halves and with neighbours?
#
# <details><summary>Hint 2: the idea</summary>
#
# A table of angles is an outer product, every position times every frequency: `positions[:, None] * frequencies`. `chunk(2, dim=-1)`
# gives the $x$ of all pairs and the $y$ of all pairs. `cos` has no dimension for the heads; `cos[:, None, :]` has one. bfloat16 times
# float32 is float32, so cast at the end only.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# rotary_angles     0, 2, 4, ... divided by head_dim  ->  frequencies  ->  table of angles  ->  cos and sin, as float32
# apply_rope        x in float32, cut into halves  ->  both formulas  ->  torch.cat of the new halves  ->  x's dtype
# pairs_to_halves   unflatten the rows into (heads, head_dim // 2, 2), swap the last two of these, reshape back
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-1-rotary", "locked": false, "schema_version": 3, "solution": true, "task": false}
def rotary_angles(positions, head_dim, base=10_000.0):
    """cos and sin, (seqlen, head_dim // 2) each, of each position and pair."""
    ### BEGIN SOLUTION
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = base ** (-exponents / head_dim)
    angles = positions[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()
    ### END SOLUTION


def apply_rope(x, cos, sin):
    """x (batch, seqlen, heads, head_dim) turned by its angles; pairs are half a head apart."""
    ### BEGIN SOLUTION
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
    ### END SOLUTION


def pairs_to_halves(weight, heads):
    """The rows of a query or key projection, from neighbours to halves."""
    ### BEGIN SOLUTION
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-3-1-rotary-angles", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_rope_angles(rotary_angles)
### BEGIN HIDDEN TESTS
checks.check_rope_angles(rotary_angles, seed=11)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-1-rotary-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_rope_values(apply_rope)
### BEGIN HIDDEN TESTS
checks.check_rope_values(apply_rope, seed=12)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-1-rotary-positions", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_rope_positions(rotary_angles, apply_rope)
### BEGIN HIDDEN TESTS
checks.check_rope_positions(rotary_angles, apply_rope, seed=13)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-1-rotary-conventions", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_rope_conventions(pairs_to_halves)
### BEGIN HIDDEN TESTS
checks.check_rope_conventions(pairs_to_halves, seed=14)
### END HIDDEN TESTS

# %% [markdown]
# Your functions can drive a real model. The next cell loads SmolLM2's weights into a small decoder of this lab
# (`labsupport.training.Decoder`; you train one below). Its method `turn` gets the positions and returns the function
# that rotates queries and keys. We put yours in its place:

# %%
own_angles = checks.solution_or_reference(rotary_angles, labs_angles, checks.check_rope_angles)
own_rope = checks.solution_or_reference(apply_rope, apply_rotary_emb, checks.check_rope_values)
decoder = training.from_transformers(smollm2.model)
some = repeat.ids[:, :129].to(device)


def with_your_rope(model):
    """The decoder, with your functions for its positions."""

    def turn(positions):
        config = model.config
        cos, sin = own_angles(positions.flatten(), config.head_dim, base=config.rope_base)
        return lambda x: own_rope(x, cos, sin)

    model.turn = turn
    return model


@torch.no_grad()
def nll(model):
    return model(some[:, :-1], some[:, 1:]).item()


with torch.no_grad():
    logits = smollm2.model(some[:, :-1]).logits[0]
theirs = torch.nn.functional.cross_entropy(logits, some[0, 1:]).item()
right = nll(with_your_rope(decoder))
print(f"NLL of SmolLM2: with Transformers' RoPE {theirs:.4f}, with yours {right:.4f}")
assert abs(right - theirs) < 1e-3

# %% [markdown]
# Both conventions are in use. What if weights of one meet code of the other? The shapes fit, and nothing is NaN. First
# we move SmolLM2's rows into llama2.c's order, then back with your `pairs_to_halves`:

# %%
own_rows = checks.solution_or_reference(
    pairs_to_halves,
    lambda weight, heads: permute_rotary_rows(weight, heads, to_interleaved=False),
    checks.check_rope_conventions,
)


@torch.no_grad()
def move_rows(model, move):
    for block in model.blocks:
        for projection in (block.attention.query, block.attention.key):
            heads = projection.out_features // model.config.head_dim
            projection.weight.copy_(move(projection.weight, heads))


move_rows(decoder, lambda w, heads: permute_rotary_rows(w, heads, to_interleaved=True))
mixed = nll(decoder)
move_rows(decoder, own_rows)
back = nll(decoder)
print(f"NLL: right {right:.2f}, conventions mixed {mixed:.2f}, after pairs_to_halves {back:.2f}")
assert back == right

# %% [markdown]
# The NLL about doubles, and no error is raised. A model trained from scratch is equally good with either convention;
# only a *checkpoint* belongs to one. So look up which one first.
#
# Positions are only numbers here. On another device, the second half of a sequence gets positions from the middle on.
# And a model can read a longer context than it was trained on if its pairs turn more slowly ([chapter
# 7](../theory/07-long-context.md#longer-than-in-training)): either all pairs, or, with a larger base, a pair the
# more, the slower it is.
#
# ![Turns of each of 32 pairs at the last token, logarithmic: trained on 1,024 tokens, and at 8,192 as it is, interpolated, and with a larger base. Interpolated falls on the trained line; the larger base starts with the line of 8,192 and meets the trained line at the last pair only; below one turn everything above the trained line is new to the model](../theory/figures/long-context-turns.png)

# %% [markdown]
# ## 3.3 · What a long step costs
#
# *Core.* Now we train. The `tiny` decoder has 4 layers of width 128, 4 heads, and reads bytes: 0.8 million weights. A
# *step* is forward, backward, and AdamW. We compare standard attention with FlashAttention, with everything else equal,
# in float32. (On a GPU, FlashAttention's kernels take 16-bit numbers only, so memory-efficient attention, a kernel
# based on the same idea, runs instead. The column *kernel* names what ran.)
#
# **Predict first**: if a sequence gets 8 times as long, how many times as much memory does a step with FlashAttention take?

# %%
predicted_growth = None  # your guess, a number

# %%
standard = MemoryStrategy("standard", MemoryOptions(attention="standard"))
flash = MemoryStrategy("flash", MemoryOptions())
tiny = DecoderConfig.preset("tiny")
lengths = [8192, 16_384, 32_768, 65_536] if gpu else [512, 1024, 2048, 4096]
limit = "60GiB" if gpu else "1GiB"
steps = measure_training(
    tiny, lengths, strategies=[standard, flash], limit=limit, max_seconds=0.4
)  # on a CPU a few seconds
checked = steps[steps.status == "ok"]
memory = checked.pivot(index="seqlen", columns="backend", values="peak_memory_bytes")
growth = memory.flash.iloc[-1] / memory.flash.iloc[0]
checks.compare_prediction("Memory at 8 times the length", predicted_growth, growth, "times")
readable(steps).assign(kernel=steps.kernel.str.split(".").str[-1])

# %%
static = 16 * tiny.parameters / 2**20
plotting.plot_memory(
    steps,
    title=f"At 8 times the length, FlashAttention takes {growth:.1f} times the memory",
    label="peak memory of a step, weights included (MiB)",
    references=[plotting.Reference("weights, gradients and AdamW's states", static)],
)

# %% [markdown]
# Rows marked *predicted* were not run: the plan (section 3.5) says that they need more than the limit. On a logarithmic
# chart a power $a N^b$ is a straight line, and $b$ is its slope. Here are the slopes fitted to the two longest lengths
# of each:

# %%
slopes = {
    what: {
        name: exponent(rows.seqlen.tail(2).tolist(), rows[column].tail(2).tolist())
        for name, rows in checked.groupby("backend")
    }
    for what, column in {"memory": "peak_memory_bytes", "time": "median_ms"}.items()
}
pd.DataFrame(slopes).round(2)


# %% [markdown]
# Weights, gradients and AdamW's states (the line in the chart) do not grow, so with FlashAttention 8 times the length
# takes less than 8 times the memory, and the slopes of memory lie below 1 and 2. What grows is linear with FlashAttention, and quadratic without.
# FlashAttention's *time* is not linear, because it still computes all pairs. The slope of time is a mixture: matrices
# grow with $N$, attention with $N^2$, and the longer the sequence, the larger attention's part. (The textbook's slope may
# exceed 2 where its scores outgrow a cache. A slope of time below 1 means that another program used the cores: run the
# cell again.)

# %% [markdown]
# ## 3.4 · The largest tensor is not attention's
#
# *Core.* Real models read words, not bytes. GPT-2's vocabulary has 50,257 tokens, and the classifier computes a number
# for each of them at every position. For 4,096 tokens these logits take 0.8 GB, the log-softmax as much again, and its
# gradient too. All of it serves one number, the loss, which is a sum over tokens.

# %% [markdown]
# ### Exercise 3-2 · A loss without all the logits
# ●●● · 25 minutes · 6 points
#
# With a hidden state $h$ and the weight $W$ of the classifier, one token has
#
# $$z = W h, \qquad \text{loss} = \ln \textstyle\sum_j e^{z_j} - z_\text{label}, \qquad d = \text{softmax}(z) -
# \text{onehot}(\text{label})$$
#
# and its gradients are $W^\top d$ for $h$, and $d\,h^\top$ for $W$. The loss of a sequence is the **mean** over the
# tokens whose label is not -100. (If there is none, the loss and its gradients are 0.)
#
# Write it as a `torch.autograd.Function`. Its `forward` gets `ctx`, which stores what `backward` needs, and then
#
# | | shape | |
# | --- | --- | --- |
# | `hidden` | `(tokens, width)` | float32 or float64 |
# | `weight` | `(vocab, width)` | the same dtype |
# | `labels` | `(tokens,)` | int64; -100: this token does not count |
# | `chunk` | an int | tokens at a time; need not divide `tokens`, may be larger |
# | returns | `()` | the mean loss |
#
# Then `backward(ctx, grad_loss)` gets the gradient of the loss, one number, and returns four values: the gradients of
# `hidden` and `weight`, and `None` for `labels` and for `chunk`. All gradients are multiplied by `grad_loss`.
#
# Neither pass may create a tensor that is larger than one chunk's logits, except for tensors of the size of `hidden` or
# `weight`. And no logits may be stored for the backward pass. There are two right ways: compute the gradients in
# `forward` and store those, or compute the logits again in `backward`.
#
# <details><summary>Hint 1: a nudge</summary>
#
# The loss is a sum over tokens, and a token's gradient needs the logits of that token only. Which single number must you know before
# the loop over chunks begins?
#
# <details><summary>Hint 2: the idea</summary>
#
# `hidden[start : start + chunk]` is shorter at the end, and that is fine. Count the tokens that count once, before the loop. A
# label of -100 is no index: use `labels.masked_fill(labels == -100, 0)`, and set $d$ to 0 where the label was -100. Every chunk
# *adds* to the weight's gradient. `ctx.save_for_backward(a, b)` keeps tensors, and `a, b = ctx.saved_tensors` brings them back.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# forward    count the labels; begin with zeros for the loss and for both gradients
#            for each chunk:  logits  ->  log_softmax  ->  add the losses of the labels that count
#                             d = softmax - onehot, 0 where the label is -100, divided by the count
#                             these rows of hidden's gradient = d W;   weight's gradient += d^T hidden
#            save both gradients; return the sum of the losses / count
# backward   both gradients times grad_loss, None, None
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-2-chunked-loss", "locked": false, "schema_version": 3, "solution": true, "task": false}
class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden @ weight.T, with one chunk's logits at a time."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk):
        ### BEGIN SOLUTION
        counted = labels != -100
        count = counted.sum().clamp(min=1)
        targets = labels.masked_fill(~counted, 0)
        total = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            kept, target = counted[part], targets[part, None]
            log_p = torch.log_softmax(hidden[part] @ weight.T, dim=-1)
            total -= (log_p.gather(1, target)[:, 0] * kept).sum()
            d = log_p.exp()
            d.scatter_add_(1, target, -torch.ones_like(d[:, :1]))
            d *= kept[:, None] / count
            grad_hidden[part] = d @ weight
            grad_weight += d.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / count
        ### END SOLUTION

    @staticmethod
    def backward(ctx, grad_loss):
        ### BEGIN SOLUTION
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None
        ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-3-2-chunked-loss-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_loss_values(ChunkedLoss)
### BEGIN HIDDEN TESTS
checks.check_loss_values(ChunkedLoss, seed=21)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-2-chunked-loss-gradients", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_loss_gradients(ChunkedLoss)
### BEGIN HIDDEN TESTS
checks.check_loss_gradients(ChunkedLoss, seed=22)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-2-chunked-loss-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_loss_memory(ChunkedLoss)


# %% [markdown]
# How much memory does it save? The next cell measures the loss alone, on 512 tokens of width 128:


# %%
def all_logits(hidden, weight, labels):
    return torch.nn.functional.cross_entropy(hidden @ weight.T, labels)


def labs_chunks(hidden, weight, labels, chunk):
    return training.chunked_cross_entropy(hidden, weight, labels, chunk=chunk)


hidden = torch.randn(512, 128, device=device, requires_grad=True)
weight = torch.randn(50_257, 128, device=device, requires_grad=True)
labels = torch.randint(50_257, (512,), device=device)
own_loss = checks.solution_or_reference(
    ChunkedLoss, labs_chunks, checks.check_loss_values, checks.check_loss_gradients
)
in_chunks = getattr(own_loss, "apply", own_loss)
losses_of = {
    "all logits": all_logits,
    "yours, 64 tokens at a time": lambda h, w, y: in_chunks(h, w, y, 64),
}


def peak_of(loss):
    return measure_peak_memory(lambda: loss(hidden, weight, labels).backward()).peak_bytes / 2**20


peaks = {name: peak_of(loss) for name, loss in losses_of.items()}
pd.Series(peaks, name="peak, MiB").round().astype(int).to_frame()


# %% [markdown]
# The gradient of the weight alone takes 25 MiB, which no method can save. If you computed the gradients in `forward`,
# nothing is computed twice; if in `backward`, the logits are. Both are allowed. *Further (optional)*: can yours do
# with less? Look for tensors of the weight's size: `grad_weight += d.T @ h` first makes the product, a second one, while
# `grad_weight.addmm_(d.T, h)` adds in place; `grad * grad_loss` is a third. And look for logits of the chunk before:
# they exist until the name is used again, or deleted (`del d`).

# %% [markdown]
# ## 3.5 · What a layer keeps
#
# *Core.* Where does the rest of the memory go? A backward pass needs what the forward pass computed, so every layer
# keeps it. Here are two training steps of a small decoder, measured at every allocation and release:
#
# ![Memory of two training steps over time. Above, textbook attention: memory climbs in four steps, one for each block, jumps at the loss, and falls in the backward pass, with a small peak in each block. Below, FlashAttention with the loss in chunks and checkpointing: hardly any climb, a low loss, and a bump for each block that is computed again.](../theory/figures/step-memory.png)
#
# In the forward pass memory climbs, because every block adds what it keeps. The loss adds its logits. The backward pass
# works back block by block: after a short peak for a block's gradients, it frees what the block had kept. You can
# predict this by counting.

# %% [markdown]
# ### Exercise 3-3 · Count what a step holds
# ●●○ · 10 minutes · 4 points
#
# `kept_bytes(seqlen, width, layers, heads, mlp_width, vocab, *, stores_scores, checkpoint, loss_chunk, itemsize=4)` returns how
# many bytes a training step of a decoder in GPT-2's shape holds at its **highest moment**, beside the weights and their
# gradients. Count these numbers, of `itemsize` bytes each, for one sequence of $N$ = `seqlen` tokens; $w$ = `width`, $m$ =
# `mlp_width`, $V$ = `vocab`:
#
# | what **one block** keeps for its backward pass | numbers |
# | --- | --- |
# | inputs of the two norms, and their outputs | $4 N w$ |
# | q, k, v, and attention's output | $4 N w$ |
# | the MLP before and after GELU | $2 N m$ |
# | if `stores_scores`: the probabilities, whole, of every head | $N^2$ a head |
#
# | from the forward pass on, **kept** | numbers |
# | --- | --- |
# | without `checkpoint` | all blocks |
# | with `checkpoint` | the input of each block, $N w$; nothing else |
#
# | one moment after the other | beside **kept** |
# | --- | --- |
# | 1. the loss | `loss_chunk` is None: $3 N V$ (the log-softmax, and two gradients). Otherwise: the logits of one chunk, or of all $N$ tokens if the chunk is larger; and $V w$, the classifier's gradient |
# | 2. the last block's backward pass, in its MLP | $V w$; a gradient of $N m$; with `checkpoint` the whole block, computed again |
# | 3. the same, in its attention, if `stores_scores` | $V w$; two more matrices of $N^2$ for every head (gradients of probabilities and of scores); with `checkpoint` the whole block; less $2 N m$, since the MLP of this block is done and what it had kept is freed |
#
# The step needs as much as its largest moment. $Vw$ stays once the loss has made it: it is a gradient of a weight, and waits for the
# optimizer. The block that is computed again has its own copy of everything, its input included. Small things are left out: tables of
# single rows, the angles, the normalised last hidden states.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Mark the lines of the tables that depend on `checkpoint`, then those that depend on `stores_scores`. Which numbers are there in all
# three moments?
#
# <details><summary>Hint 2: the idea</summary>
#
# Write `block` and `kept` down first, then the three moments one by one. The causal mask hides half of a stored matrix, but does
# not make it smaller. `loss_chunk` may be larger than $N$.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# scores   heads N^2, or 0               again   block with checkpoint, or 0
# block    8 N w + 2 N m + scores        kept    layers times (N w with checkpoint, or block)
# moments  the loss; the MLP: V w + N m + again; attention, if it stores scores: V w + 2 scores - 2 N m + again
# bytes    itemsize times (kept + the largest moment)
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-3-kept-bytes", "locked": false, "schema_version": 3, "solution": true, "task": false}
def kept_bytes(
    seqlen,
    width,
    layers,
    heads,
    mlp_width,
    vocab,
    *,
    stores_scores,
    checkpoint,
    loss_chunk,
    itemsize=4,
):
    """Bytes that a training step holds at its highest moment, by the rules above."""
    ### BEGIN SOLUTION
    scores = heads * seqlen**2 if stores_scores else 0
    mlp = 2 * seqlen * mlp_width
    block = 8 * seqlen * width + mlp + scores
    kept = layers * (seqlen * width if checkpoint else block)
    again = block if checkpoint else 0
    classifier = vocab * width
    if loss_chunk is None:
        logits = 3 * seqlen * vocab
    else:
        logits = min(loss_chunk, seqlen) * vocab + classifier
    moments = {"the loss": logits}
    moments["the MLP's backward pass"] = classifier + again + seqlen * mlp_width
    if stores_scores:
        moments["attention's backward pass"] = classifier + again + 2 * scores - mlp
    return itemsize * (kept + max(moments.values()))
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-3-3-kept-bytes-blocks", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_kept_blocks(kept_bytes)
### BEGIN HIDDEN TESTS
checks.check_kept_blocks(kept_bytes, seed=31)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-3-kept-bytes-checkpoint", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_kept_checkpoint(kept_bytes)
### BEGIN HIDDEN TESTS
checks.check_kept_checkpoint(kept_bytes, seed=32)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-3-kept-bytes-loss", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_kept_loss(kept_bytes)
### BEGIN HIDDEN TESTS
checks.check_kept_loss(kept_bytes, seed=33)
### END HIDDEN TESTS

# %% [markdown]
# A formula is as good as its predictions. The next cell compares it with real steps, measured to the byte (on a GPU the
# figures differ a little, because its kernels need other temporary tensors):

# %%
own_kept = checks.solution_or_reference(
    kept_bytes,
    checks.ex_3_3_kept_bytes.held_bytes,
    checks.check_kept_blocks,
    checks.check_kept_checkpoint,
    checks.check_kept_loss,
)
sizes = {"width": 128, "layers": 4, "heads": 4, "mlp_width": 512, "vocab": 257}
cases = {
    "standard": (MemoryOptions(attention="standard"), True, False, None),
    "flash": (MemoryOptions(), False, False, None),
    "flash, checkpointing": (MemoryOptions(checkpoint=True), False, True, None),
}
rows = []
for name, (savings, scores, checkpoint, chunk) in cases.items():
    counted = own_kept(1024, **sizes, stores_scores=scores, checkpoint=checkpoint, loss_chunk=chunk)
    measured = training.measure_step(tiny, seqlen=1024, savings=savings, device=device).peak_bytes
    rows.append((name, counted + 16 * tiny.parameters, measured))
counts = pd.DataFrame(rows, columns=["case", "your count + 16 bytes a weight", "measured"])
(counts.set_index("case") / 2**20).round(1)

# %% [markdown]
# Your function predicts real steps. The 16 bytes of each weight are the weight itself, its gradient, and AdamW's two
# averages, all float32. Your count may be a few MiB off: at the peak most of the gradients do not exist yet, and small
# things are left out. The lab's own function counts them, and `print(training.plan_memory(tiny, seqlen=8192))` shows
# each part with its formula, in the symbols of theory chapter 7.

# %% [markdown]
# ## 3.6 · The wall, and what moves it
#
# *Core.* Here is the decoder again, now with a vocabulary of 16,384: 2 million more weights. We allow it 640 MiB and
# want 2,048 tokens. We add one remedy at a time and keep the earlier ones.
#
# **Predict first**: how many MiB does the loss in chunks save, on top of FlashAttention?

# %%
predicted_saving = None  # your guess, in MiB

# %%
words = DecoderConfig.preset("tiny", vocab_size=16_384)
remedies = [
    MemoryStrategy("standard", MemoryOptions(attention="standard")),
    MemoryStrategy("flash", MemoryOptions()),
    MemoryStrategy("+ loss in chunks", MemoryOptions(loss_chunk=256)),
    MemoryStrategy("+ checkpointing", MemoryOptions(loss_chunk=256, checkpoint=True)),
    MemoryStrategy(
        "+ MLP in chunks", MemoryOptions(loss_chunk=256, checkpoint=True, mlp_chunk=512)
    ),
]
ladder = measure_training(words, [2048], strategies=remedies, limit="640MiB", max_seconds=0.0)
peak = ladder.set_index("backend").peak_memory_bytes / 2**20
saved = peak["flash"] - peak["+ loss in chunks"]
checks.compare_prediction("Saved by the loss in chunks", predicted_saving, saved, "MiB")
readable(ladder)

# %%
parts = []
for remedy in remedies[:-1]:  # the rules of exercise 3-3 know no MLP in chunks
    how = {
        "stores_scores": remedy.savings.attention == "standard",
        "checkpoint": remedy.savings.checkpoint,
        "loss_chunk": remedy.savings.loss_chunk,
    }
    shape = sizes | {"vocab": words.vocab_size}
    moment = own_kept(2048, **shape | {"layers": 0}, **how)  # without what blocks keep
    kept = own_kept(2048, **shape, **how) - moment
    parts += [
        (remedy.name, "weights, gradients, AdamW's states", 16 * words.parameters),
        (remedy.name, "kept", kept),
        (remedy.name, "the largest moment", moment),
    ]
parts = pd.DataFrame(parts, columns=["case", "part", "bytes"])
ran = ladder[ladder.status == "ok"].set_index("backend")
bars = parts.groupby("case", sort=False).bytes.sum()
plotting.plot_memory_parts(
    parts,
    title=f"The counted peak of {bars.index[0]} is {bars.iloc[0] / bars.iloc[-1]:.0f} times that "
    f"of {bars.index[-1]}",
    measured=ran.peak_memory_bytes.to_dict(),
    limit=("allowed: 640 MiB", 640 * 2**20),
    small_print=f"Bars: your count. 2,048 tokens, vocabulary 16,384, float32, {device.type}",
)


# %% [markdown]
# A remedy lowers the peak only if the peak consists of what it reduces. Here the MLP in chunks saves little or nothing,
# because the moment of the loss is as high, or nearly: it holds 256 rows of logits (one, or several such tensors, if the
# loop over chunks does not `del` what the next chunk can do without), the embedding's gradient and, larger than both, the
# weights and AdamW's states. In a wider model the MLP in chunks does help. What each one costs:
#
# | remedy | lowers | price |
# | --- | --- | --- |
# | FlashAttention | scores: $N^2$ a head | a sixth more FLOPs in attention, but still faster, except for short sequences |
# | loss in chunks | logits: $N V$ | none, if `forward` makes the gradients |
# | checkpointing | what blocks keep: one number a token and channel instead of $8w + 2m = 16w$ with $m = 4w$, so a sixteenth; and one block while it is computed again | each block's forward pass twice |
# | MLP in chunks | the widest tensors of one block | its forward pass once more |
# | bfloat16 autocast | half of most activations | digits (notebook 1, section 1.10); copies of all weights |
#
# Two more are often named: a smaller *batch* helps until it is 1. *Accumulation*, several small batches before one
# update, lets a small batch compute what a large one would. Neither makes room for a longer sequence. The next cell
# measures that; its last row shows, for comparison, the effect of 16 bits.


# %%
def peak_mib(**options):
    return training.measure_step(tiny, seqlen=512, device=device, **options).peak_bytes / 2**20


pd.Series(
    {
        "batch 4": peak_mib(batch=4),
        "batch 1, accumulated 4 times": peak_mib(accumulation=4),
        "batch 1": peak_mib(),
        "batch 1, bfloat16 autocast": peak_mib(autocast=torch.bfloat16),
    },
    name="peak, MiB",
).round(1).to_frame()

# %% [markdown]
# *Further (optional), to the end of the section.* How far do the same remedies carry a real size? The next cell shows the
# longest sequences that trained in 16 GiB: GPT-2 small's shape, 124 million weights, with RoPE instead of learned
# positions, on an H200 whose allocator was limited (the 16-bit stream: on an H100). Each row adds a remedy. In the lab's
# repository, `python -m benchmarks training --preset gpt2-small --longest --limit 16GiB` finds the limit of your GPU.

# %%
gpt2_small = DecoderConfig.preset("gpt2-small")
runs = ("short-h200", "long-h200", "stream-h100", "million-h200")
reached = pd.concat([load_run(f"context-16gib-{run}") for run in runs], ignore_index=True)
reached["peak, GiB"] = (reached.peak_memory_bytes / 2**30).round(1)
reached["step, s"] = (reached.median_ms / 1000).round(1)
reached = reached.rename(columns={"backend": "remedy", "seqlen": "longest in 16 GiB, tokens"})
reached[["remedy", "longest in 16 GiB, tokens", "peak, GiB", "step, s"]]

# %% [markdown]
# The 16-bit stream takes 120 times as many tokens as the first row. With heads in groups and host memory a **million
# tokens** train in the same 16 GiB; a longer sequence was not tried. The figure shows the plan as lines. Its dots are these
# runs, and 256K and 512K tokens of `context-16gib-million-rows-h200`; `million-h200` uses the whole card:
#
# ![GPU memory of a training step of GPT-2 small's shape against tokens, from 1K to 1M, both logarithmic: standard attention rises four-fold for each doubling and crosses 16 GiB near 6K; FlashAttention is a straight line through 16 GiB near 16K; with the loss in chunks, checkpointing and the MLP in chunks the crossing moves beyond 200K, with a 16-bit stream beyond 400K, and with host memory beyond a million; measured steps, as dots, lie on the lines. On the right, parts of the step at 128K tokens](../theory/figures/long-context-memory.png)
#
# Transformers' GPT-2 with plain eager attention reaches 3,072 tokens there, and 18,432 in its best setting
# (`context-16gib-plain-h200`). The plan ([chapter 7](../theory/07-long-context.md#where-the-wall-stands) has its table)
# promises up to a third more than what ran: it counts tensors, while the limit counts everything that the allocator has
# reserved, and the search went in steps of 1,024 tokens. A step that fits may still take too long: time grows with $N^2$,
# and the million takes three minutes.

# %% [markdown]
# ## 3.7 · Many documents, one sequence
#
# *Core.* Real documents differ in length. Padding all of them to the longest length wastes most of the work. So
# documents are *packed*, one after the other, into one sequence, and `cu_seqlens` says where each begins. Here is
# Python's own help, as bytes:

# %%
tokenizer = training.ByteTokenizer()
documents = [tokenizer.encode(document.text) for document in training.help_documents()]
rows = []
for length in (2048, 4096, 8192):
    sequences = list(training.pack(documents, length, end_token=tokenizer.end_token))
    parts = [one.cu_seqlens.diff() for one in sequences]
    pairs = sum(int(part.square().sum()) for part in parts) / (len(parts) * length**2)
    rows.append((length, len(parts), sum(map(len, parts)) / len(parts), 100 * pairs))
columns = ["tokens", "sequences", "documents in each", "pairs inside a document, %"]
first = sequences[0]
print("starts of the documents in the first 8,192, and the end:", first.cu_seqlens.tolist())
print("positions around the second:", first.positions[0, first.cu_seqlens[1] - 2 :][:5].tolist())
pd.DataFrame(rows, columns=columns).round(1)

# %% [markdown]
# Positions begin at 0 in each document, and in each part of a document that was cut. With a causal mask alone, each
# document would see all documents before it. The next cell changes the first document and looks at the second:

# %% tags=["nbval-check-output"]
generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 48, 2, 16, generator=generator).unbind(0)
changed = v.clone()
changed[:16] += 1  # another first document
apart, together = torch.tensor([0, 16, 48]), torch.tensor([0, 48])
for name, offsets in (("cu_seqlens", apart), ("causal mask alone", together)):
    before = attention_varlen(q, k, v, offsets, offsets, causal=True)
    after = attention_varlen(q, k, changed, offsets, offsets, causal=True)
    print(f"{name}: the second document changes by {(after - before)[16:].abs().max():.2f}")

# %% [markdown]
# Packing is cheaper, too: attention costs the *sum of squares* of the documents' lengths, not the square of their
# sum. A backend without a packed kernel, such as FlexAttention here, raises an error.

# %% [markdown]
# ## 3.8 · Training, for real
#
# *Core.* Each step trains the decoder on 8,192 bytes of Python's own source, with *your* RoPE and *your* loss in
# chunks. The first cell checks that your loss and the gradient of the classifier's weight are those of all logits
# together. Then the lab's loop trains with AdamW. Its learning rate depends on the step alone, and it clips gradients
# at norm 1 (the table shows the norm before).

# %%
source = [tokenizer.encode(document.text) for document in training.source_documents()]
stream = training.batches(source, 8192, end_token=tokenizer.end_token)
two_layers = DecoderConfig.preset("tiny", layers=2)


def first_loss(model):
    batch = training.tensors(stream(0)[0])
    loss = model(*(batch[name][:, :512].to(device) for name in ("tokens", "labels")))
    return loss.item(), torch.autograd.grad(loss, model.head.weight)[0]


torch.manual_seed(0)
model = training.Decoder(two_layers, MemoryOptions(loss_chunk=256)).to(device)
model = with_your_rope(model)
at_once = with_your_rope(training.Decoder(two_layers).to(device))
at_once.load_state_dict(model.state_dict())
model.chunked_loss = lambda hidden, weight, labels: in_chunks(
    hidden.flatten(0, 1), weight, labels.flatten(), model.savings.loss_chunk
)
your_loss, your_gradient = first_loss(model)
all_loss, all_gradient = first_loss(at_once)
off = (your_gradient - all_gradient).norm() / all_gradient.norm()
print(
    f"512 tokens: loss of all logits {all_loss:.5f}, yours {your_loss:.5f}; the gradient is {off:.0e} off"
)
assert max(abs(your_loss - all_loss), off) < 1e-4

# %%
history = training.train(model, stream, TrainConfig(steps=2, learning_rate=3e-3))
history.frame()[["step", "loss", "grad_norm", "tokens_per_s"]].round(3)

# %% [markdown]
# Your own code trains a model. But is FlashAttention *right* in training? A loss curve alone does not tell: with
# FlashAttention and with the textbook, two runs of the same seed round differently, and their curves may drift apart.
# Ask three questions:
#
# 1. Are the first step's gradients as near to the exact ones as the textbook's? (The rule of notebook 1.)
# 2. Do the first losses agree?
# 3. Later on, do the curves differ by more than those of two seeds?
#
# A recorded run of 200 steps of 2,048 bytes answers them.

# %%
courses = load_run("agreement-cpu")
record = courses.attrs["provenance"]
print(
    f"worst first gradient ({record['worst_gradient']}): "
    f"{record['worst_gradient_error']:.1e} relative, "
    f"allowed {record['worst_gradient_allowed']:.1e}"
)
print(f"first 20 losses: at most {consistency.together(courses):.0e} apart")
plotting.plot_runs(
    courses,
    title=f"The first 20 losses of one seed's two runs are {consistency.together(courses):.0e} apart",
    small_print=f"recorded: {record['device']}, {record['date'][:10]}; {record['data']}",
)


# %% [markdown]
# Over 200 steps the two curves are at most 5e-7 apart; the curve of another seed is 0.25 away on average. (This is
# float32 on a CPU; 16 bits need their own test.)
#
# Trouble shows first in the loss and the gradient norm. Some noise is normal, because each batch is another text. A
# jump of the norm that stays is a warning. The loop clips the gradients, and stops before NaN gets into the weights:


# %%
def tiny_run(learning_rate):
    torch.manual_seed(1)
    small = training.Decoder(DecoderConfig.preset("tiny", layers=1))
    short = training.batches(source[:1], 128, end_token=tokenizer.end_token)
    return training.train(small, short, TrainConfig(8, learning_rate), progress=False)


try:
    tiny_run(learning_rate=1e30)
except RuntimeError as error:
    print(textwrap.fill(str(error), 110))


# %% [markdown]
# **Long runs get killed**: by a time limit, by a full disk, by you. A checkpoint holds the weights, AdamW's averages
# and the number of the step, which determines the random numbers. A new one replaces the old one only when it is
# complete. On a CPU, a resumed run equals an uninterrupted one to the last bit:


# %%
def losses(steps, folder=None):
    """The losses of steps 0 to `steps`, and the steps that were taken here."""
    taken = []

    def noted(step):
        taken.append(step)
        return short(step)

    torch.manual_seed(1)
    small = training.Decoder(DecoderConfig.preset("tiny", layers=1))
    short = training.batches(source[:1], 128, end_token=tokenizer.end_token)
    settings = TrainConfig(steps=steps, decay_steps=8, checkpoint_every=2)
    history = training.train(small, noted, settings, folder=folder, progress=False)
    return history.losses, taken


with tempfile.TemporaryDirectory() as folder:
    losses(4, folder)  # and here somebody pulls the plug
    resumed, taken = losses(8, folder)
print(f"resumed with steps {taken}; the same to the last bit: {resumed == losses(8)[0]}")

# %% [markdown]
# ## 3.9 · What long contexts are good for
#
# *Further (optional).* Attention can look things up. `recall` is a decoder of 0.25 million weights, trained to find
# facts again in long dialogues and in lists of records. The texts are random, so no
# model knows the answers in advance. Here is the end of one text, beginning with a fact, and a question about this
# fact:

# %%
unseen = recall.unseen_documents(count=2)  # 2,048 bytes each: two lists, two dialogues
talk = unseen[-1]
question = talk.questions[0]
distance = len(talk.text) - question.evidence[0]
print("...", talk.text[question.evidence[0] :], sep="")
print(f"{question.prompt}... ({distance:,} bytes before: {question.answer})")

# %% [markdown]
# **Predict first**: the model sees the last eighth of such a text (256 bytes). What share of the questions does it
# answer?

# %%
predicted_share = None  # your guess, a number between 0 and 1

# %%
finder = recall.load_recall(device)
scores = recall_scores.accuracy_by_window(finder, unseen, [256, 512, 1024, 2048])
scores["right"] = scores.accuracy * scores.n
sums = scores.groupby(["window", "solver"])[["right", "n"]].sum()
found = (sums.right / sums.n).unstack().reset_index()
checks.compare_prediction(
    "Right with an eighth of the text", predicted_share, found.model[0], possible=(0, 1)
)
plotting.plot_by_window(
    found,
    {
        "model": "the model",
        "last value": "the last value of that kind",
        "pattern": "a regular expression",
    },
    title=f"Right with an eighth of the text: {found.model[0]:.0%}; "
    f"with all of it: {found.model[3]:.0%}",
    ylabel="share of right answers",
    unit="bytes",
    references=[plotting.Reference("guessing", found.guess[0])],
    small_print=f"recall, {finder.config.parameters:,} weights; "
    f"{sum(len(d.questions) for d in unseen)} questions",
)

# %% [markdown]
# The model finds nearly everything that it sees, and can only guess the rest. (A regular expression finds every
# visible fact, because we wrote the form of the facts into it. The model learned that form.) In texts of 4,096 bytes,
# longer than most of its training texts, the model finds far fewer facts, although all are visible. So a model does
# not *use* everything that *fits* into its context.
#
# Larger tasks were recorded with SmolLM2. Here are two: questions about facts in a
# long document, and the names of the functions that a whole source file calls. For each window, the table shows the
# share of right answers, and what a plain text search finds without a model:

# %%
asked = context[context.measure.isin(["right", "search", "model"])]
asked = asked[(asked.task == "document") | ((asked.task == "code") & (asked.sites == "all"))]
asked = asked.replace({"measure": {"right": "model"}}).astype({"window": int})
asked.pivot_table(index="window", columns=["task", "measure"], values="value").round(2)

# %% [markdown]
# With the whole document visible, the model answers two thirds of the questions. Compare with the column *search*: if
# questions repeat the document's words, try a plain search first. [Chapter
# 7](../theory/07-long-context.md#what-a-long-context-is-good-for) has more.

# %% [markdown]
# ## What you measured on one device
#
# - A model predicts a repeated passage far better if its window reaches the first occurrence; plain text gains
#   little.
# - RoPE makes scores depend on distances. Weights of one convention run in code of the other without an error, but
#   worse.
# - A step's memory follows your formula: it grows with $N^2$ for the textbook, and with $N$ for FlashAttention. Time
#   grows with $N^2$ for both.
# - Once attention no longer limits the length, the logits do, and after them what the blocks keep. Each has its remedy
#   and its price.
# - Packed documents do not see each other, if `cu_seqlens` is passed on. A resumed run is the same to the last bit.
# - A fact must be visible to be found, and the model must have learned to look that far.
#
# <details><summary>1. Your step runs out of memory at 16,384 tokens: FlashAttention, a vocabulary of 128,000, batch 1. What do you change first?</summary>
#
# The loss in chunks: the logits alone are 16,384 × 128,000 × 4 bytes = 7.8 GiB, and three tensors of that size exist
# together. It costs next to no time. Checkpointing comes next. Accumulation does not help: the batch is 1 already.
# </details>
#
# <details><summary>2. A colleague says that FlashAttention made attention linear. What does your table of slopes say?</summary>
#
# Its memory is linear, but its time is quadratic. The measured slope is below 2, because the matrices take much of
# the time, and their time is linear. With each doubling the slope comes nearer to 2.
# </details>
#
# <details><summary>3. A Llama checkpoint gives fluent nonsense in your own code. Shapes, dtypes, tokenizer are right. Where do you look?</summary>
#
# At the rotary convention: halves in Transformers' files, neighbours in llama2.c's. Then at the base (`rope_theta`), and at
# positions that start at 1.
# </details>
#
# A good place for a break.

# %% [markdown]
# # Part two: several devices
#
# **After this part you can**
#
# - merge partial results of attention exactly, and write ring attention down as a double loop;
# - divide a causal sequence so that all devices have the same amount of work, with the right positions and labels;
# - say what DDP, FSDP and ring attention make smaller on each rank and what they send for it, and measure both;
# - read an efficiency, and recognise a run that lost a process.
#
# You don't need a second device. A *rank* is one process with its part of the work. Two processes on a laptop's CPU
# exchange the same kinds of messages as GPUs do. All ranks together are the *world*; $W$ is their number.

# %%
from labsupport.attention import merge_attention
from labsupport.attention.reference import standard_attention
from labsupport.distributed import demos, positions_of, setup_ddp, cleanup_ddp, unshard_sequence
from labsupport.distributed.launch import LaunchError, launch
from labsupport.distributed.minimal_ring import send_on
from labsupport.distributed.ring import Plan

# %% [markdown]
# ## 3.10 · One device is not enough
#
# *Core.* How much memory does a training step need for one sequence of a million tokens, with every remedy of section
# 3.6? The planner answers for GPT-2 small, and for a model with the shape of Llama 3 and 8 billion weights
# (arXiv 2407.21783, table 3):

# %% tags=["nbval-check-output"]
sizes = {"vocab_size": 128_256, "width": 4096, "layers": 32, "heads": 32, "mlp_width": 14_336}
llama3_8b = DecoderConfig(**sizes, kv_heads=8, norm="rms", mlp="swiglu", bias=False, tied=False)
for name, config in {
    "GPT-2 small": DecoderConfig.preset("gpt2-small"),
    "Llama 3 8B": llama3_8b,
}.items():
    plan = training.what_fits(config, "139GiB", seqlen=2**20, device="cuda").iloc[-1]
    state = 16 * config.parameters / 2**30
    print(f"{name}: {plan.peak_bytes / 2**30:.0f} GiB, of which weights and states {state:.0f}")

# %% [markdown]
# ![The least time of a training step, in seconds, against the number of tokens: the time of the matrix products grows in proportion, the time of attention with the square. The two are equal near 11 thousand tokens. At a million tokens, a measured step takes minutes.](../theory/figures/long-context-flops.png)
#
# An H200, one of the largest GPUs, has 140 GiB, and about 139 of them are free for PyTorch. The small model fits, but
# time grows with $N^2$: a step took 235 seconds in the figure's run, and three minutes in that of section 3.6. At the
# GPU's peak rate, it would still take 93 and 73 seconds ([chapter 7](../theory/07-long-context.md) counts the FLOPs).
# The large model would need 171 GiB. It does not fit, for two reasons: each of its weights needs 16 bytes, and there
# are a million tokens. Several devices can share the work in three ways:
#
# | | a rank works on | it sends | what gets smaller on each rank |
# | --- | --- | --- | --- |
# | **DDP**, data parallelism | sequences of its own | gradients, once a step | nothing; there are more sequences in a step |
# | **FSDP**, fully sharded | sequences of its own | parameters and gradients, layer by layer | parameters, gradients, AdamW's states |
# | **ring**, sequence parallelism | a part of *each* sequence | keys and values, in each layer; gradients | everything that grows with $N$ |
#
# Only the ring makes a longer sequence possible, so we start with it. Attention is the only layer that looks at other
# tokens. Norms, MLPs and the loss work on any part of a sequence, if each token keeps its position and its label.

# %% [markdown]
# ## 3.11 · A ring
#
# *Core.* Each rank stores the queries, keys and values of its own tokens, its *shard*. Its queries need *all* keys, but no rank has
# room for all of them. So the keys travel: in each step a rank computes with the keys and values that it has, and passes them on to
# the next rank. (Liu, Zaharia and Abbeel, *Ring Attention*, arXiv 2310.01889.)
#
# **Predict first**: with four ranks, whose keys does rank 1 have in the last step, step 3?

# %%
predicted_owner = None  # your guess, a rank: 0 to 3

# %% tags=["nbval-check-output"]
around = Plan.of(4, 1024)
pd.DataFrame(
    {
        f"step {s}": [f"K{around.owner(r, s)} V{around.owner(r, s)}" for r in range(4)]
        for s in range(4)
    },
    index=[f"rank {r}" for r in range(4)],
)

# %%
owner = around.owner(1, 3)
print(f"rank {owner}: {'right' if predicted_owner == owner else 'see row 1 of the table'}")

# %% [markdown]
# After $W$ steps, each query has met each key. But each step gives a result for only *some* of the keys, with a softmax over those
# keys alone. How do we combine two such partial results? Let's try their plain average, for 8 queries and 64 keys, with 16 keys in
# one part and 48 in the other:

# %% tags=["nbval-check-output"]
generator = torch.Generator().manual_seed(1)
q, k, v = (torch.randn(n, 32, generator=generator) for n in (8, 64, 64))
in_one = torch.softmax(q @ k.T / 32**0.5, dim=-1) @ v
few, many = (
    torch.softmax(q @ k[keys].T / 32**0.5, dim=-1) @ v[keys] for keys in (slice(16), slice(16, 64))
)
error = ((few + many) / 2 - in_one).norm() / in_one.norm()
print(f"the plain average is off by {error:.0%}")


# %% [markdown]
# The second part has three times as many keys, but the average gives it the same weight as the first. The right weight
# of a part is the denominator of its softmax: the sum of the exponentials of its scores. FlashAttention returns the
# logarithm of this sum, the *log-sum-exp* $L$ (notebook 1), along with the output. The figure cuts one row of scores
# into four parts and merges them in two orders. Each box contains a maximum $m$ and a sum $\ell$, with $L = m +
# \ln\ell$. Some boxes on the way differ, but the last one is the same:
#
# ![Two diagrams of merging four parts of a row of scores, as a chain and as a tree: the boxes on the way contain different pairs of m and l, but the last box contains m = 5 and l = 1.646 in both](../theory/figures/merge-orders.png)

# %% [markdown]
# ### Exercise 3-4 · Merge partial results
# ●●○ · 12 minutes · 5 points
#
# Two sets $a$ and $b$ of keys have no key in common. Attention over each gives an output, $O_a$ or $O_b$, and a log-sum-exp, $L_a$ or
# $L_b$. Over both together:
#
# $$L = \ln\left(e^{L_a} + e^{L_b}\right), \qquad O = e^{L_a - L}\, O_a + e^{L_b - L}\, O_b$$
#
# In code, `out` and `lse` are $O_a$ and $L_a$, the result so far, and `part` and `part_lse` are $O_b$ and $L_b$, the next part.
#
# | function | takes | returns |
# | --- | --- | --- |
# | `merge(out, lse, part, part_lse)` | `out` `(..., rows, head_dim)` and `lse` `(..., rows)`, both float32; `part`, with the shape of `out`, in float32, bfloat16 or float16; `part_lse`, with the shape of `lse`, float32 | the new result `(out, lse)`, both float32 |
# | `merge_all(parts)` | an iterable (perhaps a generator) of at least one `(part, part_lse)`, in any order | `(out, lse)` over all keys: `out` in the parts' dtype, rounded *once*; `lse` float32 |
#
# If a query sees no key of a part, its `part_lse` is -inf and its `part` is 0. If a query has seen no key so far, its
# row of `out` is 0 and its `lse` is -inf, not NaN. Log-sum-exps lie between -1,000 and 1,000. Don't change any
# argument in place. `merge_all` takes one part at a time, as a ring does, and must not store them all.
#
# <details><summary>Hint 1: a nudge</summary>
#
# One part has three keys, the other has one, and all scores are equal. Which weights must the two parts get? And what if the query
# may not see any key of the second part?
#
# <details><summary>Hint 2: the idea</summary>
#
# `torch.logaddexp` computes $L$ without overflow. The weights can still be NaN, from `-inf - (-inf)`: let
# `masked_fill` put a 0 where $L$ is -inf, before you subtract. `weight[..., None]` adds a dimension for `head_dim`.
# float32 times bfloat16 is float32.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# merge      L = logaddexp of both;  safe = L with 0 in place of -inf
#            the weights exp(lse - safe) and exp(part_lse - safe), each [..., None];  the weighted sum, and L
# merge_all  parts = iter(parts);  begin with next(parts), in float32;  merge the others into it;  cast out back, once
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-4-merge", "locked": false, "schema_version": 3, "solution": true, "task": false}
def merge(out, lse, part, part_lse):
    """The running result and one more partial result, over the keys of both; float32."""
    ### BEGIN SOLUTION
    both = torch.logaddexp(lse, part_lse)
    safe = both.masked_fill(both == -torch.inf, 0.0)
    weight, part_weight = (lse - safe).exp(), (part_lse - safe).exp()
    return weight[..., None] * out + part_weight[..., None] * part, both
    ### END SOLUTION


def merge_all(parts):
    """All partial results together; one at a time."""
    ### BEGIN SOLUTION
    parts = iter(parts)
    part, lse = next(parts)
    out, dtype = part.float(), part.dtype
    for part, part_lse in parts:
        out, lse = merge(out, lse, part, part_lse)
    return out.to(dtype), lse
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-3-4-merge-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_merge_values(merge)
### BEGIN HIDDEN TESTS
checks.check_merge_values(merge, seed=41)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-4-merge-edges", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_merge_edges(merge)
### BEGIN HIDDEN TESTS
checks.check_merge_edges(merge, seed=42)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-4-merge-all", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_merge_all(merge_all)
### BEGIN HIDDEN TESTS
checks.check_merge_all(merge_all, seed=43)
### END HIDDEN TESTS

# %% [markdown]
# Now the ring is two loops. Here they run in one process, without messages. In each step, a rank takes the keys and
# values of rank `(rank - step) % W`, their owner, from a list. Whether a query may see a key depends on the
# *positions* of both in the sequence, not on the rank that stores them.

# %%
own_merge = checks.solution_or_reference(
    merge, merge_attention, checks.check_merge_values, checks.check_merge_edges
)


def attend(q, k, v, visible):
    """Attention over some of the keys: a partial result, and its log-sum-exp."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    return (scores - shift[..., None]).exp() @ v, lse


def ring_by_hand(shards, positions):
    """Causal attention of each rank's queries; shards of (q, k, v), and where their tokens stand."""
    outputs = []
    for rank, (q, _, _) in enumerate(shards):
        out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf)
        for step in range(len(shards)):
            owner = (rank - step) % len(shards)  # whose keys have come here
            visible = positions[rank][:, None] >= positions[owner]
            part = attend(q, *shards[owner][1:], visible)
            out, lse = own_merge(out, lse, *part)
        outputs.append(out)
    return outputs


# %% tags=["nbval-check-output"]
whole = torch.randn(3, 2, 64, 16, generator=generator)  # q, k, v of 2 heads, 64 tokens
exact, _ = standard_attention(*whole, causal=True)
shards = whole.chunk(4, dim=2)
outputs = ring_by_hand(shards, torch.arange(64).chunk(4))
error = (torch.cat(outputs, dim=1) - exact).abs().max()
print(f"four ranks and one device agree to float32's rounding: {bool(error < 2e-6)}")

# %% [markdown]
# Apart from rounding, the result is exact: the sums have the same terms, in another order. The backward pass goes
# around the ring, too. In its simplest form, the gradients of K and V travel with K and V, collect a contribution
# from each rank, and return to their own rank. (The lab's complete ring works differently: [chapter
# 11](../theory/11-several-devices.md#a-ring-backward).)

# %% [markdown]
# ## 3.12 · Equal work
#
# *Core.* Now cut a causal sequence into eight shards, one after the other. The queries of rank 0 see only the keys of rank 0. Those
# of rank 7 see all keys.
#
# **Predict first**: how many times the average work does the busiest of the eight ranks have?

# %%
predicted_imbalance = None  # your guess, a number

# %%
eight = Plan.of(8, 1024, causal=True)
work = pd.Series([sum(eight.pairs(rank)) for rank in range(8)])
checks.compare_prediction("Busiest rank", predicted_imbalance, work.max() / work.mean(), "times")
figure = plotting.Chart(figsize=(7.2, 2.8))
axes = figure.subplots()
axes.bar(work.index, work / work.mean())
axes.axhline(1, color="black", linestyle=":")
axes.set(xlabel="rank", ylabel="work, average = 1")
figure.headline(
    f"Rank {work.idxmax()} has the most work, rank {work.idxmin()} the least",
    "Pairs of query and key, eight contiguous shards, causal",
)
figure


# %% [markdown]
# Rank 7 has nearly twice the average work; with $W$ ranks, the last one has $2 - 1/W$ times the average. All others
# wait for it. On average, the ranks spend almost half of their time waiting. A better order of the tokens fixes this.
# *Zigzag* cuts the sequence into $2W$ chunks, and gives rank $r$ the early chunk $r$ and the late chunk $2W - 1 - r$. (Llama 3
# was trained with this order: arXiv 2407.21783, section 3.3.2.) With four ranks:
#
# ```text
# contiguous   rank 0: 0 1              zigzag   rank 0: 0             7
#              rank 1:     2 3                   rank 1:   1         6
#              rank 2:         4 5               rank 2:     2     5
#              rank 3:             6 7           rank 3:       3 4
# ```
#
# The figure shows the causal score matrix. The colour of a part shows which rank computes it, and its number shows in
# which step:
#
# ![The causal score matrix of four ranks, cut into eight by eight chunks, coloured by the rank that computes each chunk and numbered by the step. Contiguous: the last rank has seven times as much as the first. Zigzag: all have the same, in each step. Below, the time of each rank: contiguous, rank 3 needs 3.5 units and rank 0 half a unit; zigzag, all need 2.](../theory/figures/long-context-zigzag.png)
#
# All ranks wait for the next keys, so a step takes as long as the rank with the most work. Let one *block* be the
# scores of one rank's queries with one rank's keys. Take four ranks with contiguous shards. Step 0 takes half the time
# of a block, because the mask hides half of the scores of a rank's queries with its own keys. Each of the other three
# steps takes a whole block, because rank 3 sees all the keys that arrive. Together, that is $\tfrac12 + 1 + 1 + 1$
# blocks of time. With zigzag shards the steps take $4 \cdot \tfrac12$: in each step, every rank computes half of a
# block. The mask hides the other half. After step 0 the hidden half consists of whole chunks, so a rank can skip it.

# %% [markdown]
# ### Exercise 3-5 · Zigzag order
# ●○○ · 7 minutes · 4 points
#
# | function | takes | returns |
# | --- | --- | --- |
# | `zigzag_chunks(rank, world)` | | the numbers of this rank's two chunks, out of `2 * world`: the early one, then the late one |
# | `zigzag_positions(seqlen, rank, world)` | `seqlen`: length of the whole sequence, a multiple of `2 * world` | `(seqlen // world,)` int64: the positions of this rank's tokens in the whole sequence, early chunk first |
# | `unzigzag(shards)` | a list of all ranks' shards, by rank: `(batch, seqlen // world, ...)` | the whole sequence, `(batch, seqlen, ...)`, in its original order |
#
# The tokens of a chunk stay in order.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Look at the eight chunks of four ranks in the drawing above. Which two belong to rank 0? What is the sum of the two numbers of each
# rank?
#
# <details><summary>Hint 2: the idea</summary>
#
# Chunk $c$ has the positions `c * size` to `(c + 1) * size - 1`. For the way back, `shard.chunk(2, dim=1)` gives a rank's early and
# late half. By rank, the early halves are already in order. In which order are the late ones?
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# zigzag_chunks     rank, and the chunk that is as far from the end as chunk rank is from the start
# zigzag_positions  a chunk has seqlen // (2 world) tokens;  torch.cat of one torch.arange for each chunk
# unzigzag          all early halves, then all late halves from the last rank to the first;  torch.cat along dim=1
# ```
# Or concatenate all positions, and index with their `argsort`.
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-5-zigzag", "locked": false, "schema_version": 3, "solution": true, "task": false}
def zigzag_chunks(rank, world):
    """The numbers of a rank's two chunks, of 2 * world."""
    ### BEGIN SOLUTION
    return rank, 2 * world - 1 - rank
    ### END SOLUTION


def zigzag_positions(seqlen, rank, world):
    """Where a rank's tokens stand in the whole sequence."""
    ### BEGIN SOLUTION
    size, chunks = seqlen // (2 * world), zigzag_chunks(rank, world)
    return torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks])
    ### END SOLUTION


def unzigzag(shards):
    """The whole sequence from all ranks' shards, (batch, seqlen // world, ...) each."""
    ### BEGIN SOLUTION
    early, late = zip(*(shard.chunk(2, dim=1) for shard in shards), strict=True)
    return torch.cat([*early, *reversed(late)], dim=1)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-3-5-zigzag-chunks", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_zigzag_chunks(zigzag_chunks)
### BEGIN HIDDEN TESTS
checks.check_zigzag_chunks(zigzag_chunks, seed=51)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-5-zigzag-positions", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_zigzag_positions(zigzag_positions)
### BEGIN HIDDEN TESTS
checks.check_zigzag_positions(zigzag_positions, seed=52)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-5-zigzag-inverse", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_unzigzag(unzigzag)
### BEGIN HIDDEN TESTS
checks.check_unzigzag(unzigzag, seed=53)
### END HIDDEN TESTS

# %% [markdown]
# Here is the same ring again, with your order of the tokens. Nothing else changes, because the positions alone decide
# which keys a query may see.

# %%
own_positions = checks.solution_or_reference(
    zigzag_positions,
    lambda seqlen, rank, world: positions_of(seqlen // world, rank, world, zigzag=True),
    checks.check_zigzag_positions,
)
own_unzigzag = checks.solution_or_reference(
    unzigzag, lambda shards: unshard_sequence(shards, zigzag=True), checks.check_unzigzag
)

# %% tags=["nbval-check-output"]
zigzag = [own_positions(64, rank, 4) for rank in range(4)]
shards = [whole[:, :, positions] for positions in zigzag]
for name, positions in (("zigzag", zigzag), ("contiguous", torch.arange(64).chunk(4))):
    found = own_unzigzag(ring_by_hand(shards, positions))
    print(f"{name} positions: right to 2e-6: {bool((found - exact).abs().max() < 2e-6)}")
plotting.plot_weights(  # what rank 1's queries see, step by step
    {f"rank 1, keys of {o}": zigzag[1][:, None] >= zigzag[o] for o in (1, 0, 3, 2)}
)


# %% [markdown]
# Cut the positions in the same way as the tokens. Wrong positions make a wrong mask: the result is wrong, and no error
# message tells you.

# %% [markdown]
# ## 3.13 · Real processes
#
# *Core.* Now real processes replace the list of shards. The merge and the order are still yours. `launch` starts two
# processes on this machine, runs your function in each, and returns their results. `send_on` starts to send keys and
# values to the next rank, and returns a function that waits for those of the previous rank
# (`labsupport/distributed/minimal_ring.py`).


# %%
def ring_on_this_rank(whole):
    """This rank's share of causal attention: its queries stay, keys and values travel."""
    info = setup_ddp("gloo")
    seqlen = whole.shape[2]
    local = own_positions(seqlen, info.rank, info.world)
    q, *keys = whole[:, :, local]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf)
    for step in range(info.world):
        arriving = send_on(keys)  # they travel while this rank computes
        owner = (info.rank - step) % info.world
        visible = local[:, None] >= own_positions(seqlen, owner, info.world)
        out, lse = own_merge(out, lse, *attend(q, *keys, visible))
        keys = arriving()
    cleanup_ddp()
    return out


found = own_unzigzag(launch(ring_on_this_rank, [whole], processes=2, device="cpu"))
print(f"your ring on two processes, largest error: {(found - exact).abs().max():.0e}")
assert (found - exact).abs().max() < 2e-6

# %% [markdown]
# That is ring attention, forward. The lab's complete ring also has a backward pass and sliding windows, and works
# with any attention kernel. Its functions `ring_flash_attn_func` and `zigzag_ring_flash_attn_func` have flash-attn's
# layout and options, with one shard on each rank. The next cell compares the ring's forward and backward pass with
# those of one device in float64:

# %%
looked = launch(demos.ring_on_ranks, processes=2, device="cpu")  # some seconds
errors = pd.DataFrame(looked[0]["errors"]).set_index(["case", "tensor"])
assert (errors.relative < 2e-6).all()
errors.map("{:.0e}".format)

# %% [markdown]
# The differences are rounding. Now take a whole model, `recall` of section 3.9, on 2,048 bytes with 80 questions. Each rank
# computes the loss of its own tokens, and the two losses are added. Then we make three common mistakes:
#
# 1. zigzag shards, but the ring for contiguous ones;
# 2. positions that start at 0 on each rank;
# 3. labels shifted by one *after* the sequence was cut, not before.
#
# **Predict first**: how many of the three raise the loss by more than a tenth, so that you would see them in a loss curve?

# %%
predicted_noticed = None  # your guess, 0 to 3

# %% tags=["nbval-check-output"]
pd.DataFrame(looked[0]["losses"]).set_index("case").round(3)

# %%
by_case = pd.DataFrame(looked[0]["losses"]).set_index("case").loss
noticed = int((by_case > 1.1 * by_case["one device"]).sum())
checks.compare_prediction("Mistakes that a loss curve shows", predicted_noticed, noticed)

# %% [markdown]
# You would notice the first two. The third is the worst, because it changes the loss by only 2%. The label of a token
# is the *next* token, and for the last token of a chunk, the next token is often on another rank. If you shift after
# the cut, such a last token gets a wrong label, and the model learns it. So compare the loss with that of one device,
# to the last digits, before you train on several.
#
# When did each rank compute, and when did it wait? For each layout, PyTorch's profiler recorded four forward passes
# over 4,096 tokens; the chart shows the fastest of each.
#
# **Predict first**: on two ranks, how many times as long do contiguous shards take as zigzag shards? (Count blocks, as
# in section 3.12.)

# %%
predicted_ratio = None  # your guess, a number

# %%
spans = pd.DataFrame(looked[0]["spans"] + looked[1]["spans"])
began = spans.groupby("layout").start.transform("min")
spans = spans.assign(start_ms=1e3 * (spans.start - began), end_ms=1e3 * (spans.end - began))
took = spans.groupby("layout").end_ms.max()
checks.compare_prediction(
    "Contiguous over zigzag", predicted_ratio, took["contiguous"] / took["zigzag"], "times"
)
plotting.plot_timeline(
    spans,
    title=f"Contiguous: {took['contiguous']:.0f} ms. Zigzag: {took['zigzag']:.0f} ms",
    small_print="CPU, 2 processes, 4 heads of 64, float32. "
    "Message: from its post to the end of the wait for it.",
)

# %% [markdown]
# By the count, contiguous shards take $1.5$ blocks of time and zigzag shards $1$. Your measured ratio may be smaller:
# with contiguous shards, rank 0 is idle while rank 1 computes its second block, and rank 1 can be faster when it has
# the CPU to itself. The ratio also scatters by some tenths, because each run takes only about 100 ms. If it is below 1,
# another program used the cores: run the cells again from "Real processes" on.
#
# A message to the next rank is a *hop*. A rank starts to send and receive before it computes its first block, and
# waits for the message only after that block. By then the message has arrived, and the next block starts without a gap
# (in the chart, the two blocks look like one bar). So a message costs no time if it takes less time than a block. The
# work of a block grows with the square of a shard's length, the message only in proportion to the length. So *longer*
# shards hide messages better.
#
# ![Time of a step of a ring against the tokens of one rank: the compute grows with the square of the tokens, and the hop (the message to the next rank) in proportion to them, for four kinds of links. The line of the compute crosses that of each link; beyond the crossing, the compute hides the hop.](../theory/figures/long-context-hops.png)
#
# The purpose of the ring is to save memory. Here is the peak in a forward and backward pass of a decoder with two
# layers:

# %%
memory = pd.DataFrame(demos.step_memory() + looked[0]["memory"] + looked[1]["memory"])
peaks = memory.groupby(["seqlen", "ranks"]).peak_memory_bytes.max().unstack() / 2**20
peaks.columns = [f"MiB, {ranks} rank{'s, each' * (ranks > 1)}" for ranks in peaks.columns]
peaks.round(1)

# %% [markdown]
# Each rank needs half the memory, so the sequence can be twice as long. The table leaves out the weights and AdamW's
# states. A ring does not divide them; the next section shows what does. (With more than two ranks, a rank also stores
# keys and values of two others for a short time: those that it works on, and those that are arriving.)
#
# **When a rank dies**, the others wait for its messages, possibly forever. `launch` raises an error instead:

# %%
try:
    launch(demos.leave, processes=2, device="cpu")
except LaunchError as error:
    print(error)

# %% [markdown]
# When a process on a CPU runs out of memory, you see "killed by SIGKILL". On a cluster, look for the rank that failed
# *first*. The others report a lost connection or a timeout, which is only a consequence.

# %% [markdown]
# ## 3.14 · Other data on each rank: DDP and FSDP
#
# *Further (optional).* If a model fits on one device, $W$ ranks can train it on $W$ times as many sequences per step. The next cells
# train the same model on two ranks, with DDP and with FSDP (see the table in section 3.10).
#
# **Predict first**: between two steps, each rank stores parameters, gradients and AdamW's states. Divide the bytes of
# these three under FSDP by their bytes under DDP, on two ranks: which number do you expect?

# %%
predicted_held = None  # your guess, a number between 0 and 1

# %% [markdown]
# With DDP, each rank stores everything and computes its own *micro-batches*, the small batches between two updates.
# Then an *all-reduce* averages the gradients over the ranks. If there are four micro-batches, you need the average
# only once: `no_sync()` skips the first three. FSDP *shards* parameters, gradients and AdamW's states over the ranks.
# It gathers the parameters of a decoder layer only while that layer computes.

# %%
ranks = launch(demos.train_on_ranks, processes=2, device="cpu")
trained = pd.DataFrame(ranks[0] + ranks[1])
held = trained.groupby("case", sort=False)[["parameters", "gradients", "optimizer"]].max()
share = held.loc["FSDP"].sum() / held.loc["DDP"].sum()
checks.compare_prediction("Share stored under FSDP", predicted_held, share, possible=(0, 1))
(held / 2**20).assign(all=held.sum(axis=1) / 2**20).add_suffix(", MiB").round(1)

# %%
first = trained[trained["rank"] == 0].set_index("case")
assert first.loss.max() - first.loss.min() < 1e-4
first["reduced, MiB"] = (first.all_reduced_bytes / 2**20).round(1)
print(first[["loss", "all_reduces", "reduced, MiB"]].round(3).to_string(na_rep=""))

# %% [markdown]
# DDP with `no_sync`, DDP without it and FSDP have the same loss, so they compute the same steps. Without `no_sync`,
# DDP reduces four times as many bytes and gains nothing. (One all-reduce is enough, because the 3 MiB of gradients fit
# into one *bucket* of 25 MiB. DDP sends a larger model's buckets one by one, each as soon as it is full, while the
# backward pass continues.)
#
# FSDP pays with traffic: it gathers the parameters before the forward pass and again before the backward pass, and
# then reduces the gradients. These are three transfers. DDP's all-reduce sends as much as two: first it reduces, then
# it distributes the mean. So with one micro-batch per step, FSDP has 1.5 times the traffic of DDP. Use DDP if 16 bytes
# per weight (float32, AdamW) fit on one device, FSDP if they don't, and a ring if the *sequence* does not fit. You can
# combine them.

# %% [markdown]
# ## 3.15 · How far does it carry?
#
# *Further (optional).* Two processes on a CPU can show that the result is right, but not that it is fast. So here are
# measurements on GPUs. *Efficiency* is the share of the ideal speed. For the ring, all shards have the same length
# for any $W$, so $W$ devices process a sequence that is $W$ times as long. That is $W^2$ times the work, shared by
# $W$ devices. Ideally it takes $W$ times as long as one shard on one device: this is efficiency 1.
#
# **Predict first**: count blocks as in section 3.12. What is the best efficiency of contiguous shards on four
# devices?

# %%
predicted_efficiency = None  # your guess, a number between 0 and 1

# %%
ring = load_run("ring-four-h200").query("kv_heads == 8 and direction == 'forward+backward'")
bound = 4 / (2 * 4 - 1)  # an even share is W / 2 blocks of time, contiguous shards take W - 1/2
checks.compare_prediction(
    "Contiguous shards, at best", predicted_efficiency, bound, possible=(0, 1)
)
ring["who"] = ring.implementation + ", " + ring.layout
ring["shard"] = ring.seqlen_per_rank.map("{:,} tokens on each device".format)
plotting.plot_scaling(
    pd.concat([ring.assign(world=1, efficiency=1.0), ring]),  # one device: 1 by definition
    column="efficiency",
    series="who",
    panel="shard",
    title="On 4 GPUs the lab's zigzag ring keeps 87 to 97% of the ideal, contiguous shards 56 to 59%",
    ylabel="efficiency (1: as fast as one device alone)",
    references=[
        plotting.Reference("nobody waits", 1.0),
        plotting.Reference("contiguous, at best", lambda world: world / (2 * world - 1)),
    ],
    small_print="recorded: NVIDIA H200, causal, bfloat16, 32 heads of 128, 8 key heads, forward and "
    "backward. native: PyTorch's own FlashAttention; context_parallel: PyTorch's",
)

# %% [markdown]
# This was recorded on four H200s connected by NVLink (`labsupport ring bench`), with several kernels for the blocks.
# An even share is 2 blocks of time, and the last of four contiguous shards takes 3.5: at best 2/3.5, or 57%, if
# all blocks run equally fast. (Blocks without a mask can be faster: hence 59%.) Zigzag is far better. PyTorch's
# `context_parallel` gathers all keys first, so it hides no message. The lab's ring hides them: the GPUs' *copy engines*
# (hardware that only copies memory) carry them during the computation. Messages then add 1 to 9% to the time ([chapter
# 11](../theory/11-several-devices.md#when-a-hop-hides)).
#
# For data parallelism, efficiency 1 means that $W$ devices are $W$ times as fast as one. With one micro-batch a step,
# DDP reaches 94 to 97% on four H200s, and FSDP 84 to 91%. Under FSDP each rank stores only a $W$-th of the state
# ([chapter 11](../theory/11-several-devices.md#fsdp-the-state-is-shared-too)).

# %% [markdown]
# ## 3.16 · A fault to find
#
# *Further (optional), 12 minutes.* A colleague accumulates gradients over parts of a batch, because the whole batch does not fit: "It
# should make no difference, and usually it doesn't. But on padded batches training is worse, and nobody knows why."
#
# ### Exercise 3-8 · Find the fault
# ●●○ · 10 minutes · 0 points (optional)
#
# The next cell starts with the colleague's program. *First* run it and the cell after it: a table compares the
# gradient accumulated over four parts with the gradient of the whole batch. Then write `find_fault`. It returns the
# letter of the cause and a correct `gradient_of_part`, which differs in one or two lines. The possible causes:
#
# | | the cause |
# | --- | --- |
# | `"a"` | gradients of the previous step are still there |
# | `"b"` | the tokens of the last part are lost |
# | `"c"` | all parts get the same weight, however many labels they have |
# | `"d"` | tokens without a label (-100) have a loss |
# | `"e"` | the gradients of the parts are added up, instead of averaged |
# | `"f"` | float32 rounds differently when the order of the sum changes |
#
# <details><summary>Hint 1: a nudge</summary>
#
# For which batches in the table is the gradient right? What do their parts have in common?
#
# <details><summary>Hint 2: the idea</summary>
#
# Take two parts, one with 8 labels and one with 2. Which weight does each label have in the mean loss of the whole batch? And in the
# program?
#
# <details><summary>Hint 3: an outline</summary>
#
# `F.cross_entropy(..., reduction="sum")` adds up the losses of a part's labels. By which number, the same for all
# parts, must you divide each sum? `all_labels` has the labels of the whole batch.
# </details>
# </details>
# </details>

# %% nbgrader={"grade": false, "grade_id": "ex-3-8-fault", "locked": false, "schema_version": 3, "solution": true, "task": false}
import torch.nn.functional as F

from labsupport.checks.causes import letter_and_program


def gradient_of_part(weight, hidden, labels, all_labels, parts):
    """Add this part's share to weight.grad."""
    logits = hidden @ weight.mT
    loss = F.cross_entropy(logits, labels, ignore_index=-100)
    (loss / parts).backward()


def accumulate(gradient_of_part, weight, hidden, labels, parts):
    """The gradient of the mean loss over a batch, part after part."""
    weight = weight.clone().requires_grad_()
    for part, part_labels in zip(hidden.chunk(parts), labels.chunk(parts), strict=True):
        gradient_of_part(weight, part, part_labels, labels, parts)
    return weight.grad


def find_fault():
    """The letter of the cause, and a `gradient_of_part` without the fault."""

    ### BEGIN SOLUTION
    def repaired(weight, hidden, labels, all_labels, parts):
        losses = F.cross_entropy(hidden @ weight.mT, labels, ignore_index=-100, reduction="sum")
        (losses / (all_labels != -100).sum()).backward()

    return "c", repaired
    ### END SOLUTION


def after_repair(weight, hidden, labels, parts):
    """The letter, and the gradient of the repaired program."""
    letter, repaired = letter_and_program(find_fault())
    return letter, accumulate(repaired, weight, hidden, labels, parts)


# %% tags=["nbval-check-output"]
generator = torch.Generator().manual_seed(2)
weight, hidden = (torch.randn(n, 16, generator=generator) for n in (50, 32))
rows = []
for counts in ([8, 8, 8, 8], [6, 6, 6, 6], [8, 8, 8, 2], [8, 1, 4, 2]):
    labels = torch.randint(50, (4, 8), generator=generator)
    for row, count in zip(labels, counts, strict=True):
        row[count:] = -100
    one, four = (
        accumulate(gradient_of_part, weight, hidden, labels.flatten(), parts) for parts in (1, 4)
    )
    cosine = F.cosine_similarity(one.flatten(), four.flatten(), dim=0)
    rows.append((counts, f"{four.norm() / one.norm():.3f}", f"{cosine:.3f}"))
pd.DataFrame(rows, columns=["labels in each part", "norm, 4 parts over 1", "cosine of both"])

# %% nbgrader={"grade": true, "grade_id": "ex-3-8-fault-accumulation", "locked": true, "points": 0, "schema_version": 3, "solution": false, "task": false}
checks.check_accumulation(after_repair)
### BEGIN HIDDEN TESTS
checks.check_accumulation(after_repair, seed=81)
### END HIDDEN TESTS

# %% [markdown]
# ## What you measured on several devices
#
# - Partial results and their log-sum-exps merge exactly, up to rounding, into attention over all keys. A plain average is wrong.
# - With contiguous causal shards the busiest rank has $2 - 1/W$ times the average work; zigzag balances each step.
# - Cut the positions and the labels in the same way as their tokens. Wrong ones raise no error; only the loss shows
#   them.
# - A ring divides what grows with $N$. FSDP divides the weights, their gradients and AdamW's states. DDP divides
#   nothing, and sends less than FSDP.
# - If a step has several micro-batches, DDP needs to average the gradients only once: use `no_sync`.
# - If a rank dies, the run cannot continue: the others wait, or stop with an error. Look for the rank that failed
#   first.
# - Beyond the trained length a model fails at angles that it has not seen. Slower pairs help to a degree, without further training.
# - DDP is a hook, a bucket and an all-reduce. FSDP gathers a layer, uses it and frees it. In a ring, dK and dV travel with their keys.

# %% [markdown]
# ## Six questions
#
# <details><summary>1. Why can partial results be merged exactly, although softmax needs the whole row?</summary>
#
# An output of attention is a quotient: the values, weighted by exponentials and added up, divided by the sum of the
# exponentials. The result of each part is such a quotient, and the part's log-sum-exp gives its denominator. Multiply
# the quotients by their denominators, add, and divide by the sum of the denominators. This is online softmax for
# whole results instead of tiles.
# </details>
#
# <details><summary>2. Striped attention gives rank r the tokens r, r + W, r + 2W, ... Is the work balanced? What else changes?</summary>
#
# Yes, nearly: each rank has early and late tokens (Brandon et al., *Striped Attention*, arXiv 2311.09431). But in
# every step the block is a triangle, with a mask along its diagonal. Zigzag needs a mask only in step 0.
# </details>
#
# <details><summary>3. The message to the next rank (the hop) takes 3 ms, the block 2 ms. What does a step cost, and what can you do?</summary>
#
# 3 ms, the longer of the two. A shard twice as long takes 6 ms to send and 8 ms to compute, so longer shards hide the hop. Fewer key
# heads (grouped queries) make the message smaller, and hardly change the work.
# </details>
#
# <details><summary>4. What does an all-reduce of n bytes cost each rank, and how does DDP hide most of this cost?</summary>
#
# Each rank sends $2 (W-1)/W \cdot n$ bytes, nearly independent of $W$: once around to add up, once around to
# distribute the sum. DDP starts as soon as the last layers' bucket is full, while the backward pass still computes
# the earlier layers.
# </details>
#
# <details><summary>5. The ranks have 5, 5, 5 and 4 micro-batches left. What happens under plain DDP, and what is the remedy?</summary>
#
# The fifth all-reduce of three ranks waits for the fourth rank: a hang, then a timeout. You can give the last rank an
# empty micro-batch of weight 0 (as this lab does), drop the fifth micro-batch on the other ranks, or use PyTorch's
# `Join`. Also weight each micro-batch's loss by its number of labels, because a mean of means is wrong if these
# numbers differ.
# </details>
#
# <details><summary>6. A model of 7 billion weights, AdamW in float32, 8 GPUs of 80 GB. DDP or FSDP? What if the sequence has a million tokens?</summary>
#
# 16 bytes per weight are 112 GB, so DDP does not fit; FSDP needs 14 GB on each GPU. CPU offload would fit as well, but
# it is slow, because weights and gradients cross the bus in each step. At a million tokens the activations are the
# problem, and FSDP does not shard them: add a ring, and the remedies of section 3.6.
# </details>

# %% [markdown]
# ## Read on
#
# - Theory chapters [7, Long context](../theory/07-long-context.md): what a step stores, each remedy with its cost, RoPE derived, and
#   how to go beyond the training length; and [11, Several devices](../theory/11-several-devices.md): rings and data parallelism, with a
#   model of their efficiency.
# - Su et al., *RoFormer* (arXiv 2104.09864), section 3: where the rotation comes from.
# - Peng et al., *YaRN* (arXiv 2309.00071), section 3: four ways to turn more slowly, compared.
# - Chen et al., *Training Deep Nets with Sublinear Memory Cost* (arXiv 1604.06174): checkpointing.
# - Liu, Zaharia and Abbeel, *Ring Attention with Blockwise Transformers* (arXiv 2310.01889), section 3.
# - Li et al., *PyTorch Distributed* (arXiv 2006.15704), section 3: buckets, overlap, `no_sync`. Rajbhandari et al., *ZeRO* (arXiv
#   1910.02054): what FSDP shards, and what it sends.
# - To try: `labsupport ring check`, `labsupport ring bench`, and `labsupport train --parallel ring`, on as many processes or GPUs as
#   you have.

# %% [markdown]
# ### How far you are
#
# The checks run once more, on what you have defined. (`labsupport progress`, in a terminal, reads the saved notebooks.)

# %%
from labsupport.course.progress import show_progress

show_progress("03", globals())
