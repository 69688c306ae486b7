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
# ![The longest sequence that trains in 16 GiB: 3,072 tokens with standard attention, 14,336 with FlashAttention, 41,984 with the loss in chunks, 1,048,576 with all remedies](../theory/figures/long-context-reach.png)
#
# The same model (GPT-2 small's shape) in the same 16 GiB, measured: 3,072 tokens at first, finally a million.
#
# **After this notebook you can**
#
# - show when a longer context helps, and rotate queries and keys by their positions (RoPE);
# - say what fills the memory of a training step, and move the limit with a loss in chunks and other remedies;
# - pack documents into one sequence, and watch a training run;
# - spread one sequence over several devices with ring attention, and say what DDP and FSDP do instead.
#
# **Time**: about 130 minutes, up to 160 (estimated), of which the exercises take 79. A good place to pause: after 3.7.
#
# **You need** notebooks 1 and 2. A laptop is enough.
#
# **Theory**, not required: chapters [7](../theory/07-long-context.md) and [11](../theory/11-several-devices.md), and the
# [glossary](../theory/glossary.md).
#
# **Exercises**: 3-1, 3-2, 3-4, 3-8 (other numbers: bonus, in `further/`). Stored outputs come from the solutions.

# %%
import re
import tempfile

import pandas as pd
import torch
import torch.nn.functional as F

from labsupport import checks, models, plotting, training
from labsupport.attention import attention_varlen, merge_attention, standard_attention
from labsupport.attention.rotary import apply_rotary_emb, permute_rotary_rows
from labsupport.attention.rotary import rotary_angles as labs_angles
from labsupport.distributed import cleanup_ddp, demos, positions_of, setup_ddp, unshard_sequence
from labsupport.distributed.launch import launch
from labsupport.distributed.minimal_ring import send_on
from labsupport.distributed.ring import Plan
from labsupport.profiling import environment_card, load_run, measure_peak_memory
from labsupport.training import DecoderConfig, MemoryOptions, TrainConfig, consistency
from labsupport.training.measure import MemoryStrategy, measure_training, readable
from labsupport.training.tasks import facts, recall, recall_scores, windows

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
gpu = device.type == "cuda"
environment_card()

# %% [markdown]
# ## 3.1 · Why longer?
#
# SmolLM2, from notebook 2, reads source code that contains a passage of 128 tokens
# twice, 512 tokens apart. It sees only the last 128, 384 or 512 tokens. How well does it predict the second
# occurrence? (*NLL*, the negative log-likelihood, is in nats a token; guessing blindly costs 10.8.)
#
# **Predict first**: how many times smaller is the NLL once the window reaches the first occurrence?

# %%
predicted_fall = None  # your guess, a number

# %%
smollm2 = models.load_model("smollm2", dtype=torch.float32, device=device)
passage = models.source_text("heapq")
repeat = windows.with_repeat(
    smollm2.tokenizer,
    models.source_text("argparse"),
    passage[passage.index("def merge(") :],
    distance=512,
)
by_window = windows.nll_by_window(
    smollm2.model, repeat.ids, repeat.target, [128, 384, repeat.distance]
)
fall = by_window.nll.iloc[0] / by_window.nll.iloc[-1]
checks.compare_prediction("Fall of the NLL", predicted_fall, fall, "times")
by_window.drop(columns="seen").round(2)

# %% [markdown]
# Nothing changes until the window reaches the first occurrence; then the model *copies* it. A long context pays where
# something far away is needed again. `recall` is a small decoder, trained to find facts again in long lists and
# dialogues. The end of a dialogue, cut off, and a question:

# %%
unseen = recall.unseen_documents(count=2)  # 2,048 bytes each: two lists, two dialogues
talk = unseen[-1]
question = talk.questions[0]
print("...", talk.text[question.evidence[0] :], sep="")
print(f"{question.prompt}... {question.answer}")

# %%
finder = recall.load_recall(device)
scores = recall_scores.accuracy_by_window(finder, unseen, [256, 512, 1024, 2048])
scores["right"] = scores.accuracy * scores.n
sums = scores.groupby(["window", "solver"])[["right", "n"]].sum()
found = (sums.right / sums.n).unstack().reset_index()
plotting.plot_by_window(
    found,
    {"model": "the model", "last value": "a rule: the last value in sight"},
    title=f"Right with an eighth of the text: {found.model[0]:.0%}; "
    f"with all of it: {found.model[3]:.0%}",
    ylabel="share of right answers",
    unit="bytes",
    references=[plotting.Reference("guessing", found.guess[0])],
    small_print=f"recall, {finder.config.parameters:,} weights; "
    f"{sum(len(d.questions) for d in unseen)} questions",
)

# %% [markdown]
# The model finds nearly everything that it sees, and can only guess the rest. (Orange: the last room, time or code in
# sight, whatever it belongs to.) The table compares three tasks by the share of the text that a model sees: questions
# about facts in a long *document* and function names in a *source file* (both recorded: SmolLM2, 4,096 tokens), and the
# *dialogues* of `recall` (without the lists, which the chart above includes). *Search* is a plain text search.

# %%
runs = load_run("context-cpu").query("measure in ['right', 'search', 'model']")
runs = runs[(runs.task == "document") | ((runs.task == "code") & (runs.sites == "all"))]
runs = runs.assign(
    share=runs.window / 4096,
    task=runs.task.replace("code", "source file"),
    measure=runs.measure.replace("right", "model"),
)
dialogues = scores[(scores.kind != "locker") & (scores.solver == "model")]
dialogues = dialogues.groupby("window")[["right", "n"]].sum()
table = runs.pivot_table(index="share", columns=["task", "measure"], values="value")
table["dialogue", "model"] = (dialogues.right / dialogues.n).set_axis(dialogues.index / 2048)
table.dropna().round(2).rename(index="{:.1%} of the text".format)


# %% [markdown]
# All three gain from more text, the source file least: ordinary code mostly needs what is near. With the whole document
# in sight, the search answers all questions, SmolLM2 two thirds. What *fits* into a context is not always *used*.
#
# ## 3.2 · A position for every token
#
# Without a mask, attention cannot tell "dog bites man" from "man bites dog". GPT-2 *learned* a vector for each of 1,024
# positions,
# and has none for the 1,025th. *Rotary position embedding*, RoPE, has no last position: it rotates each pair of numbers
# of a query or key by an angle that grows with the position.
#
# ![A fast and a slow pair at several positions; a query and a key, moved together, keep their angle](../theory/figures/rotary-turn.png)
#
# Turning keeps lengths, so it changes a dot product only by the angle *between* the two: a score sees the
# tokens' distance.

# %% [markdown]
# ### Exercise 3-1 · Turn by position
# ●●○ · essential · 20 minutes · 7 points
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
# Compute the angles in float64: float32 has 7 digits, too few for position 100,000.
#
# Two conventions say which numbers form a pair $(x, y)$: *halves* (Transformers) and *neighbours* (RoFormer, llama2.c).
# `apply_rope` works with halves. So `pairs_to_halves` reorders the rows of a model made for neighbours: in a head of
# eight, rows `0 1 2 3 4 5 6 7` become `0 2 4 6 1 3 5 7`.
#
# ![Halves: 0 belongs to 4, 1 to 5, and so on. Neighbours: 0 belongs to 1, 2 to 3](../theory/figures/rotary-pairs.png)
#
# <details><summary>Hint 1: a nudge</summary>
#
# Take one pair: $d = 2$, so $f = 1$. In a head of eight, which number is the partner of number 1, with halves and with
# neighbours?
#
# <details><summary>Hint 2: the idea</summary>
#
# Every position times every frequency: `positions[:, None] * frequencies`. `chunk(2, dim=-1)` gives the $x$ and the $y$
# of all pairs. `cos` has no dimension for the heads; `cos[:, None, :]` has one.
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


# %% nbgrader={"grade": true, "grade_id": "ex-3-1-rotary-angles", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
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

# %% nbgrader={"grade": true, "grade_id": "ex-3-1-rotary-conventions", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_rope_conventions(pairs_to_halves)
### BEGIN HIDDEN TESTS
checks.check_rope_conventions(pairs_to_halves, seed=14)
### END HIDDEN TESTS

# %% [markdown]
# Your functions can drive a real model: SmolLM2's weights in a decoder of this lab, with your functions in its method
# `turn`:

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
theirs = F.cross_entropy(logits, some[0, 1:]).item()
right = nll(with_your_rope(decoder))
whose = "yours" if own_rope is apply_rope else "the lab's"
print(f"NLL of SmolLM2: with Transformers' RoPE {theirs:.4f}, with {whose} {right:.4f}")
assert abs(right - theirs) < 1e-3

# %% [markdown]
# What if weights of one convention meet code of the other? We move SmolLM2's rows into llama2.c's order, then back with
# your `pairs_to_halves`:

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
# The NLL about doubles, and no error is raised. So look up which convention a file of weights uses.
#
# ## 3.3 · What a long step costs
#
# The `tiny` decoder has 4 layers of width 128, 4 heads, and reads bytes: 0.8 million weights. A *step* is forward,
# backward, and the optimizer AdamW. We compare standard attention with FlashAttention in float32, within a limit of
# memory. FlashAttention's GPU kernels take only 16-bit numbers: there, a similar kernel for float32 runs.
#
# **Predict first**: a sequence gets 8 times as long. How many times as much memory does a step with FlashAttention
# take?

# %%
predicted_growth = None  # your guess, a number

# %%
tiny = DecoderConfig.preset("tiny")
both = [
    MemoryStrategy("standard", MemoryOptions(attention="standard")),
    MemoryStrategy("flash", MemoryOptions()),
]
lengths = [8192, 16_384, 32_768, 65_536] if gpu else [512, 1024, 2048, 4096]
limit = "60GiB" if gpu else "1GiB"
steps = measure_training(tiny, lengths, strategies=both, limit=limit, max_seconds=0.2)
memory = steps[steps.status == "ok"].pivot(
    index="seqlen", columns="backend", values="peak_memory_bytes"
)
growth = memory.flash.iloc[-1] / memory.flash.iloc[0]
checks.compare_prediction("Memory at 8 times the length", predicted_growth, growth, "times")
readable(steps)

# %%
static = 16 * tiny.parameters / 2**20
plotting.plot_memory(
    steps,
    title=f"At 8 times the length, FlashAttention takes {growth:.1f} times the memory",
    label="peak memory of a step, weights included (MiB)",
    references=[plotting.Reference("weights, gradients and AdamW's states", static)],
)


# %% [markdown]
# The row marked *predicted* was not run: it needs more than the limit. With $N$ tokens, the memory of standard
# attention grows with $N^2$, that of FlashAttention with $N$. It is less than 8 times, as one part stays: 12 bytes a
# weight (the dotted line's 16, less 4 for the gradient). FlashAttention still computes all
# pairs: *its* time grows with $N^2$, that of the other layers with $N$, that of a step in between.
#
# ## 3.4 · The largest tensor is not attention's
#
# GPT-2's vocabulary has 50,257 tokens, and the classifier computes a number for each of them at every position. For
# 4,096 tokens these *logits* take 0.8 GB, the log-softmax as much again, and its gradient too. All of it serves one
# number, the loss.

# %% [markdown]
# ### Exercise 3-2 · A loss without all the logits
# ●●● · essential · 32 minutes · 8 points
#
# With a hidden state $h$ and the weight $W$ of the classifier, one token has
#
# $$z = W h, \qquad \text{loss} = \ln \textstyle\sum_j e^{z_j} - z_\text{label}, \qquad d = \text{softmax}(z) -
# \text{onehot}(\text{label})$$
#
# and its gradients are $W^\top d$ for $h$, and $d\,h^\top$ for $W$. The loss of a sequence is the **mean** over the
# tokens whose label is not -100. (If there is none, the loss and its gradients are 0.)
#
# Write it as a `torch.autograd.Function`. `forward(ctx, hidden, weight, labels, chunk)` returns the mean loss (a scalar):
#
# | | shape | |
# | --- | --- | --- |
# | `hidden` | `(tokens, width)` | float32 or float64 |
# | `weight` | `(vocab, width)` | the same dtype |
# | `labels` | `(tokens,)` | int64; -100: this token does not count |
# | `chunk` | an int | tokens at a time; need not divide `tokens`, may be larger |
#
# `backward(ctx, grad_loss)` gets the gradient of the loss, one number, and returns four values: the gradients of
# `hidden` and `weight`, multiplied by `grad_loss`, and `None` for `labels` and for `chunk`.
#
# Neither pass may create a tensor larger than one chunk's logits, except for tensors of the size of `hidden` or
# `weight`. No logits may be stored for the backward pass. Two ways are right: compute the gradients in `forward` and
# store those, or compute the logits again in `backward`. Keep all sums in the dtype of the inputs.
#
# <details><summary>Hint 1: a nudge</summary>
#
# A token's gradient needs that token's logits only. Which number must you know before the loop over chunks begins?
#
# <details><summary>Hint 2: the idea</summary>
#
# A label of -100 is no index: use `labels.masked_fill(labels == -100, 0)`, and set $d$ to 0 there. Every chunk *adds*
# to the weight's gradient. `ctx.save_for_backward(a, b)` stores tensors, and `a, b = ctx.saved_tensors` brings them
# back.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# forward    count the labels; begin with zeros for the loss and for both gradients
#            for each chunk:  logits  ->  log_softmax  ->  add the losses of the labels that count
#                             d = softmax - onehot, 0 where the label is -100, divided by max(count, 1)
#                             these rows of hidden's gradient = d W;   weight's gradient += d^T hidden
#            save both gradients; return the sum of the losses / max(count, 1)
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
            d *= kept[:, None]
            d /= count
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


# %% nbgrader={"grade": true, "grade_id": "ex-3-2-chunked-loss-values", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_loss_values(ChunkedLoss)
### BEGIN HIDDEN TESTS
checks.check_loss_values(ChunkedLoss, seed=21)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-2-chunked-loss-gradients", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
checks.check_loss_gradients(ChunkedLoss)
### BEGIN HIDDEN TESTS
checks.check_loss_gradients(ChunkedLoss, seed=22)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-2-chunked-loss-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_loss_memory(ChunkedLoss)


# %% [markdown]
# How much memory do you save? The loss alone, forward and backward, on 1,024 tokens with GPT-2's vocabulary:


# %%
def labs_chunks(hidden, weight, labels, chunk):
    return training.chunked_cross_entropy(hidden, weight, labels, chunk=chunk)


own_loss = checks.solution_or_reference(
    ChunkedLoss, labs_chunks, checks.check_loss_values, checks.check_loss_gradients
)
in_chunks = getattr(own_loss, "apply", own_loss)
who = "you" if own_loss is ChunkedLoss else "the lab"
hidden = torch.randn(1024, 128, device=device, requires_grad=True)
weight = torch.randn(50_257, 128, device=device, requires_grad=True)
labels = torch.randint(50_257, (1024,), device=device)


def peak_of(loss):
    return measure_peak_memory(lambda: loss(hidden, weight, labels).backward()).peak_bytes


naive = peak_of(lambda h, w, y: F.cross_entropy(h @ w.T, y))
mine = peak_of(lambda h, w, y: in_chunks(h, w, y, 32))
plotting.plot_memory_parts(
    pd.DataFrame(
        [("all at once", "loss", naive), (f"in chunks, by {who}", "loss", mine)],
        columns=["case", "part", "bytes"],
    ),
    title=f"In chunks, the loss needs {mine / 2**20:.0f} MiB instead of {naive / 2**20:.0f}",
    small_print=f"1,024 tokens, vocabulary 50,257, float32, chunks of 32 tokens, {device.type}",
)


# %% [markdown]
# The weight's gradient takes 25 MiB, which no method can save, and each chunk's addend to it 25 more.
#
# ## 3.5 · What a layer keeps, and the wall
#
# A backward pass needs what the forward pass computed, so every layer keeps it. Two training steps of a small
# decoder, measured at every allocation:
#
# ![Memory over time. Textbook: a high peak at the loss. With all remedies: low, with a bump for each block that is computed again](../theory/figures/step-memory.png)
#
# Every block adds what it keeps, the loss adds its logits, and the backward pass frees block by block.
# *Checkpointing* (nothing to do with files) keeps only the input of each block, and computes the block again in the
# backward pass. Eight lines count it. Read two lines: `block`, what a block keeps, and `loss`.


# %%
def kept_bytes(seqlen, width, layers, heads, mlp, vocab, scores, checkpoint, loss_chunk):
    """Bytes of a step at its highest moment, float32, beside 16 for each weight."""
    score = heads * seqlen**2 if scores else 0  # the probabilities, where they are stored
    block = seqlen * (8 * width + 2 * mlp) + score  # norms, q, k, v, out, MLP
    kept = layers * (seqlen * width if checkpoint else block)
    again = block if checkpoint else 0
    loss = 3 * seqlen * vocab if loss_chunk is None else (loss_chunk + width) * vocab
    in_mlp = vocab * width + seqlen * mlp + again
    in_attention = vocab * width + 2 * score - 2 * seqlen * mlp + again
    return 4 * (kept + max(loss, in_mlp, in_attention))


def count(config, seqlen, savings):
    sizes = (config.width, config.layers, config.heads, config.inner_width, config.vocab_size)
    scores = savings.attention == "standard"
    return kept_bytes(seqlen, *sizes, scores, savings.checkpoint, savings.loss_chunk)


# %% [markdown]
# Do they predict real steps? With a vocabulary of 16,384, 2,048 tokens and a limit of 640 MiB, we add one remedy at a time:

# %%
words = DecoderConfig.preset("tiny", vocab_size=16_384)
remedies = [
    MemoryStrategy("standard", MemoryOptions(attention="standard")),
    MemoryStrategy("flash", MemoryOptions()),
    MemoryStrategy("+ loss in chunks", MemoryOptions(loss_chunk=256)),
    MemoryStrategy("+ checkpointing", MemoryOptions(loss_chunk=256, checkpoint=True)),
]
ladder = measure_training(words, [2048], strategies=remedies, limit="640MiB", max_seconds=0.0)
ran = ladder[ladder.status == "ok"].set_index("backend").peak_memory_bytes.to_dict()
weights = 16 * words.parameters
parts = pd.DataFrame(
    [(r.name, "weights, gradients, AdamW's states", weights) for r in remedies]
    + [(r.name, "the step, counted", count(words, 2048, r.savings)) for r in remedies],
    columns=["case", "part", "bytes"],
)
totals = parts.groupby("case", sort=False).bytes.sum()
plotting.plot_memory_parts(
    parts,
    title="Counted, the first case needs "
    f"{totals.iloc[0] / totals.iloc[-1]:.0f} times the memory of the last",
    measured=ran,
    limit=("allowed: 640 MiB", 640 * 2**20),
    small_print=f"Bars: counted. 2,048 tokens, vocabulary 16,384, float32, {device.type}",
)


# %% [markdown]
# The first case does not fit, so it was not run. The others lie a little below the count: at the peak most gradients of
# weights do not exist yet. What each remedy costs:
#
# | remedy | makes smaller | price |
# | --- | --- | --- |
# | FlashAttention | scores: $N^2$ a head | none, except for short sequences |
# | loss in chunks | logits: $N$ × vocabulary | none, if `forward` makes the gradients |
# | checkpointing | what blocks keep: from $8w + 2m$ numbers a token to $w$ (width $w$, the MLP's $m$) | each block's forward pass twice |
# | bfloat16 autocast | most activations, to half | digits; 16-bit copies of all weights |
# | batch in parts, *accumulated* | activations, down to those of one sequence | gradients stay; no help for one long sequence |
#
# The last two rows, measured:


# %%
def peak_mib(**options):
    return training.measure_step(tiny, seqlen=256, device=device, **options).peak_bytes / 2**20


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
# Do 8,192 tokens train within 16 GiB on a GPU? The lab's planner is a more exact version of these eight lines. It answers for GPT-2 small. ([Chapter 7](../theory/07-long-context.md#where-the-wall-stands) compares it with recorded steps, and explains the last three rows.)

# %% tags=["nbval-check-output"]
plan = training.what_fits(DecoderConfig.preset("gpt2-small"), "16GiB", seqlen=8192, device="cuda")
plan.assign(peak=(plan.peak_bytes / 2**30).round(1))[["remedy", "peak", "fits"]].rename(
    columns={"peak": "peak at 8,192 tokens, GiB", "fits": "fits into 16 GiB"}
)

# %% [markdown]
# With FlashAttention it fits. The remedies after it lead to the million at the top.
#
# ## 3.6 · Many documents, one sequence
#
# Padding to the longest wastes most of the work. So documents are *packed*, one after the other, into one
# sequence, and `cu_seqlens` says where each begins. Python's help, as bytes (the end of a
# sequence cuts a document):

# %%
tokenizer = training.ByteTokenizer()
documents = [tokenizer.encode(document.text) for document in training.help_documents()]
rows = []
for length in (2048, 4096, 8192):
    sequences = list(training.pack(documents, length, end_token=tokenizer.end_token))
    sizes = [one.cu_seqlens.diff() for one in sequences]
    pairs = sum(int(size.square().sum()) for size in sizes) / (len(sizes) * length**2)
    rows.append((length, len(sizes), sum(map(len, sizes)) / len(sizes), 100 * pairs))
columns = ["tokens", "sequences", "documents in each", "pairs inside a document, %"]
pd.DataFrame(rows, columns=columns).round(1)

# %%
packed = next(one for one in sequences if len(one.cu_seqlens) > 4)  # at least four documents
starts = packed.cu_seqlens[:-1]
every = torch.arange(0, length, 64)  # each 64th token
document = torch.bucketize(every, starts, right=True)
causal = every[:, None] >= every
same = document[:, None] == document
print("cu_seqlens:", packed.cu_seqlens.tolist())
chart = plotting.plot_weights(
    {
        "causal mask alone": causal,
        "causal mask and cu_seqlens": causal & same,
    },
    title="Without cu_seqlens, documents leak into each other",
)
for axes in chart.axes:
    axes.images[0].set_extent((0, length, length, 0))  # the axes count tokens
    axes.set(xticks=range(0, length + 1, 2048), yticks=range(0, length + 1, 2048))
chart

# %% [markdown]
# Dark: the query sees the key. Positions begin at 0 in each document. Change the first document, and look at the second:

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
# ## 3.7 · Train it: your RoPE, your loss
#
# A decoder with your RoPE and your loss (the lab's, where yours do not pass) learns from dialogues like the one above.
# A token is a word with the space before it; each of 100 steps reads 1,024 tokens of packed dialogues. GPT-2's initial
# weights are too small for so narrow a model, so the cell multiplies them by 3.

# %%
texts = [facts.dialogue(8000, seed=seed, facts=40).text for seed in range(60)]
split = re.compile(r" ?\w+|[^\w ]").findall
vocabulary = sorted({word for text in texts for word in split(text)})
number = {word: n for n, word in enumerate(vocabulary)}
talks = [[number[word] for word in split(text)] for text in texts]
stream = training.batches(talks, 1024, end_token=len(vocabulary))

torch.manual_seed(0)
config = DecoderConfig.preset("tiny", layers=2, vocab_size=len(vocabulary) + 1, tied=False)
model = with_your_rope(training.Decoder(config, MemoryOptions(loss_chunk=256)).to(device))
model.chunked_loss = lambda hidden, weight, labels: in_chunks(
    hidden.flatten(0, 1), weight, labels.flatten(), model.savings.loss_chunk
)
with torch.no_grad():
    for weights in model.blocks.parameters():
        weights *= 3 if weights.ndim == 2 else 1
print(f"{config.parameters:,} weights, {len(vocabulary)} different words")

# %%
settings = TrainConfig(steps=100, learning_rate=1e-2, warmup_steps=5)
history = training.train(model, stream, settings)
history.chart()


# %% [markdown]
# Some noise is healthy, because each batch is another text. A gradient norm that jumps and stays up is a warning. The
# loop clips gradients at norm 1, and stops before NaN gets into the weights. Now the model
# writes:


# %%
@torch.no_grad()
def write(model, start, length, temperature=0.6):
    tokens = [number[word] for word in split(start)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        logits = model(torch.tensor([tokens], device=device))[0, -1, : len(vocabulary)].cpu()
        chances = torch.softmax(logits / temperature, dim=-1)
        tokens.append(torch.multinomial(chances, 1, generator=generator).item())
    return "".join(vocabulary[token] for token in tokens)


print(write(model, "18:21", 150))

# %% [markdown]
# It has the *form*: times, names, full stops. It has no sense yet, and the times don't rise.
#
# Is FlashAttention *right* in training? With it and with standard attention, the same seed gives slightly
# different numbers, because they round differently. So ask: do the first gradients pass the error rule of notebook 1,
# and do the first 20 losses agree? A recorded run answers:

# %% tags=["nbval-check-output"]
courses = load_run("agreement-cpu")
record = courses.attrs["provenance"]
print(
    f"worst first gradient: {record['worst_gradient_error']:.1e} relative, "
    f"allowed {record['worst_gradient_allowed']:.1e}"
)
print(f"first 20 losses: at most {consistency.together(courses):.0e} apart")


# %% [markdown]
# **Long runs get killed.** A checkpoint file holds the weights, AdamW's averages and the number of the step. On a CPU,
# a resumed run equals an uninterrupted one to the last bit:


# %% tags=["nbval-check-output"]
def losses(steps, folder=None):
    torch.manual_seed(1)
    small = training.Decoder(DecoderConfig.preset("tiny", layers=1, vocab_size=config.vocab_size))
    short = training.batches(talks, 128, end_token=len(vocabulary))
    settings = TrainConfig(steps=steps, decay_steps=8, checkpoint_every=2)
    return training.train(small, short, settings, folder=folder, progress=False).losses


with tempfile.TemporaryDirectory() as folder:
    losses(4, folder)  # and here somebody pulls the plug
    resumed = losses(8, folder)
print(f"the same to the last bit: {resumed == losses(8)}")

# %% [markdown]
# ## 3.8 · One device is not enough
#
# What does a step on one sequence of a million tokens need, with every remedy? The planner answers for GPT-2 small, and
# for the shape of Llama 3 with 8 billion weights (arXiv 2407.21783, table 3):

# %% tags=["nbval-check-output"]
sizes = {"vocab_size": 128_256, "width": 4096, "layers": 32, "heads": 32, "mlp_width": 14_336}
llama3_8b = DecoderConfig(**sizes, kv_heads=8, norm="rms", mlp="swiglu", bias=False, tied=False)
for name, shape in {
    "GPT-2 small": DecoderConfig.preset("gpt2-small"),
    "Llama 3 8B": llama3_8b,
}.items():
    plan = training.what_fits(shape, "139GiB", seqlen=2**20, device="cuda").iloc[-1]
    state = 16 * shape.parameters / 2**30
    print(f"{name}: {plan.peak_bytes / 2**30:.0f} GiB, of which weights and states {state:.0f}")

# %% [markdown]
# The second does not fit into an H200's 139 GiB. Several devices can share the work. A *rank* is one process with its
# part of it; all ranks together are the *world*, and $W$ is their number.
#
# | | a rank works on | it sends | what gets smaller on each rank |
# | --- | --- | --- | --- |
# | **ring**, sequence parallelism | a part of *each* sequence | keys and values, in each layer; gradients | everything that grows with $N$ |
# | **DDP**, distributed data parallel | other sequences | gradients, once a step | nothing; a step has more sequences |
# | **FSDP**, fully sharded data parallel | other sequences | parameters and gradients, layer by layer | parameters, gradients, AdamW's states |
#
# FSDP shrinks the 120 GiB of weights and states, so here it already makes the sequence fit. It does not shrink the 51
# GiB that grow with $N$. Only the ring does, and divides the time too. Only attention looks at other tokens; all other
# layers work on any part of a sequence.
#
# ## 3.9 · A ring
#
# Each rank stores the queries, keys and values of its own tokens, its *shard*. Its queries need *all* keys, but no rank
# has room for all of them. So the keys travel:
#
# ![Four ranks on a circle: in step 1, the keys and values of the rank before have arrived](../theory/figures/ring-circle.png)
#
# Each step then gives a result for *some* of the keys, with a softmax over those keys alone. How do we combine two of
# them? Try their plain average, with 16 keys in one part, 48 in the other:

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
# The second part has three times as many keys, but the same weight. The right weight is the denominator of its softmax,
# the sum of the exponentials of its scores. FlashAttention returns its logarithm, the *log-sum-exp* $L$. The figure
# merges four parts of a row in two orders; each box contains a maximum $m$ and a sum $\ell$, with $L = m + \ln\ell$.
# Both orders end in the same box:
#
# ![Four parts merged as a chain and as a tree: the last box is the same](../theory/figures/merge-orders.png)

# %% [markdown]
# ### Exercise 3-4 · Merge partial results
# ●●○ · essential · 17 minutes · 7 points
#
# Attention over each of two sets of keys, $a$ and $b$, gives an output and a log-sum-exp. Over both together:
#
# $$L = \ln\left(e^{L_a} + e^{L_b}\right), \qquad O = e^{L_a - L}\, O_a + e^{L_b - L}\, O_b$$
#
# In code, `out` and `lse` are $O_a$ and $L_a$, the result so far, and `part` and `part_lse` are $O_b$ and $L_b$.
#
# | function | takes | returns |
# | --- | --- | --- |
# | `merge(out, lse, part, part_lse)` | `out`, `part`: `(..., rows, head_dim)`; `lse`, `part_lse`: `(..., rows)`; all float32, but `part` may be bfloat16 or float16 | the new result `(out, lse)`, both float32 |
# | `merge_all(parts)` | an iterable (perhaps a generator) of at least one `(part, part_lse)`, in any order | `(out, lse)` over all keys: `out` in the parts' dtype, rounded *once*; `lse` float32 |
#
# If a query sees no key of a part, its `part_lse` is -inf and its `part` is 0. If *neither* part has a visible key,
# return -inf and 0, not NaN. Log-sum-exps lie between -1,000 and 1,000. Don't change any argument in place. `merge_all`
# takes one part at a time, and must not store them all.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Three keys in one part, one key in the other, all scores equal: which weights must the parts get? And what if the
# query sees no key of the second part?
#
# <details><summary>Hint 2: the idea</summary>
#
# `torch.logaddexp` computes $L$ without overflow. The weights can still be NaN, from `-inf - (-inf)`: let
# `masked_fill` put a 0 where $L$ is -inf, before you subtract. `weight[..., None]` adds a dimension for `head_dim`.
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


# %% nbgrader={"grade": true, "grade_id": "ex-3-4-merge-values", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_merge_values(merge)
### BEGIN HIDDEN TESTS
checks.check_merge_values(merge, seed=41)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-4-merge-edges", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_merge_edges(merge)
### BEGIN HIDDEN TESTS
checks.check_merge_edges(merge, seed=42)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-4-merge-all", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_merge_all(merge_all)
### BEGIN HIDDEN TESTS
checks.check_merge_all(merge_all, seed=43)
### END HIDDEN TESTS

# %% [markdown]
# Now the ring is two loops. Here they run in one process: in each step, a rank takes the keys and values of rank
# `(rank - step) % W` from a list. Whether a query may see a key depends on the *positions* of both, not on the rank.

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


whole = torch.randn(3, 2, 64, 16, generator=generator)  # q, k, v of 2 heads, 64 tokens
exact, _ = standard_attention(*whole, causal=True)
outputs = ring_by_hand(whole.chunk(4, dim=2), torch.arange(64).chunk(4))
error = (torch.cat(outputs, dim=1) - exact).abs().max()
print(f"four ranks and one device agree to float32's rounding: {bool(error < 2e-6)}")

# %% [markdown]
# The backward pass goes around the ring, too: [chapter 11](../theory/11-several-devices.md#a-ring-backward).
#
# ## 3.10 · Equal work
#
# Cut a causal sequence into eight shards, one after the other. Rank 0's queries see only its own keys, those of rank 7
# all.
#
# **Predict first**: how many times the average work does the busiest of the eight ranks have?

# %%
predicted_imbalance = None  # your guess, a number

# %% tags=["nbval-check-output"]
eight = Plan.of(8, 1024, causal=True)
work = pd.Series([sum(eight.pairs(rank)) for rank in range(8)])
checks.compare_prediction("Busiest rank", predicted_imbalance, work.max() / work.mean(), "times")

# %% [markdown]
# All others wait for the busiest rank, on average a little more than half of the time. *Zigzag* is a better order: it
# cuts the sequence into $2W$ chunks, and gives rank $r$ the early chunk $r$ and the late chunk $2W - 1 - r$. Colours
# show which rank computes a part, numbers in which step:
#
# ![Four ranks. Contiguous: rank 3 needs 3.5 units of time, rank 0 half a unit. Zigzag: all need 2](../theory/figures/long-context-zigzag.png)
#
# The lab's `positions_of` says where a rank's tokens stand. (Write it yourself in [parallel by
# hand](further/parallel-by-hand.ipynb).) First your ring with this order. Then a mistake: zigzag tokens with contiguous
# positions. The mask is wrong, and no error is raised.

# %% tags=["nbval-check-output"]
zigzag = [positions_of(16, rank, 4, zigzag=True) for rank in range(4)]
shards = [whole[:, :, positions] for positions in zigzag]
print("rank 1 has tokens", zigzag[1].tolist())
for name, positions in (("zigzag", zigzag), ("contiguous", torch.arange(64).chunk(4))):
    found = unshard_sequence(ring_by_hand(shards, positions), zigzag=True)
    print(f"{name} positions: right to 2e-6: {bool((found - exact).abs().max() < 2e-6)}")


# %% [markdown]
# ## 3.11 · Real processes, and three mistakes
#
# `launch` starts two processes, runs your function in each, and returns their results. `send_on` starts to send keys
# and values to the next rank, and returns a function that waits for those of the previous rank.


# %%
def ring_on_this_rank(whole):
    """This rank's share of causal attention: its queries stay, keys and values travel."""
    info = setup_ddp("gloo")  # PyTorch's messages between processes on CPUs
    shard = whole.shape[2] // info.world
    places = [positions_of(shard, rank, info.world, zigzag=True) for rank in range(info.world)]
    local = places[info.rank]
    q, *keys = whole[:, :, local]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf)
    for step in range(info.world):
        arriving = send_on(keys)  # they travel while this rank computes
        visible = local[:, None] >= places[(info.rank - step) % info.world]
        out, lse = own_merge(out, lse, *attend(q, *keys, visible))
        keys = arriving()
    cleanup_ddp()
    return out


found = unshard_sequence(launch(ring_on_this_rank, [whole], processes=2, device="cpu"), zigzag=True)
whose = "your" if own_merge is merge else "the lab's"
print(f"{whose} ring on two processes, largest error: {(found - exact).abs().max():.0e}")
assert (found - exact).abs().max() < 2e-6

# %% [markdown]
# Now a whole model, `recall`, on two processes with the lab's complete ring. Then three common mistakes:
#
# 1. zigzag shards, but the ring for contiguous ones;
# 2. positions that start at 0 on each rank;
# 3. labels shifted by one *after* the sequence was cut, not before:
#
# ![Shifted after the cut, the last label of each rank is its own first token](../theory/figures/shard-edge.png)
#
# **Predict first**: how many of the three raise the loss by more than a tenth, so that you would see them in a loss
# curve?

# %%
predicted_noticed = None  # your guess, 0 to 3

# %% tags=["nbval-check-output"]
looked = launch(demos.ring_on_ranks, processes=2, device="cpu")  # about ten seconds
by_case = pd.DataFrame(looked[0]["losses"]).set_index("case")
noticed = int((by_case.loss > 1.1 * by_case.loss["one device"]).sum())
checks.compare_prediction("Mistakes that a loss curve shows", predicted_noticed, noticed)
by_case.round(3)

# %% [markdown]
# You would notice the first two. The third changes the loss by only 2%, and at each cut the model learns one wrong
# label, in every step. So compare the loss with that of one device, to five digits, before you train on several.
#
# When did each rank compute (blue), and when not? PyTorch's profiler recorded a forward pass over 4,096
# tokens:

# %%
spans = pd.DataFrame(looked[0]["spans"] + looked[1]["spans"])
began = spans.groupby("layout").start.transform("min")
spans = spans.assign(start_ms=1e3 * (spans.start - began), end_ms=1e3 * (spans.end - began))
took = spans.groupby("layout").end_ms.max()
lengths = (spans.end_ms - spans.start_ms)[spans.what == "compute"]
waits = 1 - lengths.groupby([spans.layout, spans["rank"]]).sum().unstack(0)[took.index] / took
plotting.plot_timeline(
    spans,
    title=f"Contiguous: rank 0 waits {waits.contiguous[0]:.0%} of the time. "
    f"Zigzag: {waits.zigzag[0]:.0%}",
    small_print="CPU, 2 processes, 4 heads of 64, float32. "
    "Message: from its post to the end of the wait for it.",
)

# %% [markdown]
# Counted in pairs, contiguous shards take 1.5 times as long as zigzag ones, and rank 0 waits two thirds of the time.
# Measured, it is less.
#
# The purpose of the ring is to save memory. Each rank needs half of the activations (weights are not counted: each
# rank has all):

# %%
memory = pd.DataFrame(demos.step_memory() + looked[0]["memory"] + looked[1]["memory"])
peaks = memory.groupby(["seqlen", "ranks"]).peak_memory_bytes.max().unstack() / 2**20
peaks.columns = [f"MiB, {ranks} rank{'s, each' * (ranks > 1)}" for ranks in peaks.columns]
peaks.round(1)

# %% [markdown]
# ## 3.12 · Other data on each rank: DDP and FSDP
#
# If the sequence fits on one device, $W$ ranks can train on $W$ times as many sequences per step. With DDP, each rank
# computes its own *micro-batches*, the small batches between two updates; then an *all-reduce* averages the gradients.
# `no_sync()` skips it in all micro-batches but the last (of four here). FSDP *shards* parameters, gradients and AdamW's states, and
# gathers the parameters of a layer only while that layer computes. The same model, on two ranks in three ways:

# %%
ranks = launch(demos.train_on_ranks, processes=2, device="cpu")  # about ten seconds
trained = pd.DataFrame(ranks[0]).set_index("case")
assert trained.loss.max() - trained.loss.min() < 1e-4
stored = trained[["parameters", "gradients", "optimizer"]].sum(axis=1) / 2**20
table = pd.DataFrame(
    {
        "loss": trained.loss.round(3),
        "stored on each rank, MiB": stored.round(1),
        "all-reduces a step": trained.all_reduces,
        "reduced, MiB": (trained.all_reduced_bytes / 2**20).round(1),
    }
)
table.astype(object).where(table.notna(), "–")

# %% [markdown]
# Without `no_sync`, DDP reduces four times as many bytes and gains nothing. FSDP stores half, and with one
# micro-batch sends 1.5 times DDP's bytes: two gathers and a reduction, each half an all-reduce. Use DDP if 16
# bytes per weight fit on one device, FSDP if they don't, and a ring if the *sequence* does not fit. [Chapter 11](../theory/11-several-devices.md) has their speed, measured on H200s.
#
# ## 3.13 · A fault to find
#
# A colleague accumulates gradients over parts of a batch: "It should make no difference, and usually it doesn't. But
# on padded batches training is worse."
#
# ### Exercise 3-8 · Find the fault
# ●●○ · useful · 10 minutes · 3 points
#
# *First* run the colleague's program and the cell after it: a table compares the gradient accumulated over four parts
# with that of the whole batch. Then write `find_fault`. It ends with `return letter, gradient_of_part`: a string,
# and the function with one or two lines repaired. The possible causes:
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
# Take two parts, with 8 labels and 2. Which weight has each label in the mean loss of the whole batch? And in the
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
    for row, number in zip(labels, counts, strict=True):
        row[number:] = -100
    one, four = (
        accumulate(gradient_of_part, weight, hidden, labels.flatten(), parts) for parts in (1, 4)
    )
    cosine = F.cosine_similarity(one.flatten(), four.flatten(), dim=0)
    rows.append((counts, f"{four.norm() / one.norm():.3f}", f"{cosine:.3f}"))
pd.DataFrame(rows, columns=["labels in each part", "norm, 4 parts over 1", "cosine of both"])

# %% nbgrader={"grade": true, "grade_id": "ex-3-8-fault-accumulation", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_accumulation(after_repair)
### BEGIN HIDDEN TESTS
checks.check_accumulation(after_repair, seed=81)
### END HIDDEN TESTS

# %% [markdown]
# ## What you measured
#
# - A long context helps where something far away is needed again.
# - A step's memory grows with $N^2$ (standard) or $N$ (FlashAttention). Then the logits are the limit,
# and
#   after them what the blocks keep.
# - Packed documents do not see each other, if `cu_seqlens` is passed on.
# - Partial results merge exactly by their log-sum-exps; zigzag gives all ranks equal work.
# - Wrong conventions, positions and labels raise no error.
#
# ## Three questions
#
# <details><summary>1. Your step runs out of memory at 16,384 tokens: FlashAttention, a vocabulary of 128,000, batch 1. What do you change first?</summary>
#
# The loss in chunks: the logits alone are 16,384 × 128,000 × 4 bytes = 7.8 GiB, and three tensors of that size exist
# together. Checkpointing comes next. Accumulation does not help: the batch is 1 already.
# </details>
#
# <details><summary>2. Why can partial results be merged exactly, although softmax needs the whole row?</summary>
#
# An output is a quotient: the values, weighted by exponentials and added up, divided by the sum of the exponentials. A
# part's log-sum-exp gives its denominator. Multiply the quotients by their denominators, add, and divide by the sum of
# the denominators.
# </details>
#
# <details><summary>3. A model of 7 billion weights, AdamW in float32, 8 GPUs of 80 GB. DDP or FSDP? What if the sequence has a million tokens?</summary>
#
# 16 bytes per weight are 112 GB, so DDP does not fit; FSDP needs 14 GB on each GPU. At a million tokens, 54 GB of
# activations (3.8) come on top with every remedy: FSDP still just fits, but one GPU does the whole sequence. A ring shards
# activations and work.
# </details>
#
# ## Read on
#
# Su et al., *RoFormer* (arXiv 2104.09864), section 3. Liu et al., *Ring Attention* (arXiv 2310.01889). Li et al. on DDP
# (arXiv 2006.15704). Rajbhandari et al., *ZeRO* (arXiv 1910.02054), on what FSDP shards.
#
# ### How far you are

# %%
from labsupport.course.progress import show_progress

show_progress("03", globals())
