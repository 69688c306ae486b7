# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Masks and scores of your own: FlexAttention
#
# **Time** about 45 minutes. **You need** notebook 2 up to section 2.6; for exercise 1-8, notebook 1 up to section 1.5.
# **Exercises** 2-7 and 1-8, 8 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [10, Field guide](../../theory/10-field-guide.md#a-mask-that-is-off).

# %%
import math

import torch
import torch.nn.functional as F

from labsupport import checks, plotting
from labsupport.profiling import environment_card

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
environment_card()

# %% [markdown]
# Sliding windows, several documents in one sequence, scores with a limit: each once needed a new kernel. PyTorch's
# *FlexAttention* takes them as small functions of positions, *mods*, and compiles these into a fused kernel. There are
# two kinds:
#
# - `mask_mod(b, h, q_idx, kv_idx)` says whether query `q_idx` may see key `kv_idx`, in text `b` of the batch and head `h`;
# - `score_mod(score, b, h, q_idx, kv_idx)` returns the score to use instead.
#
# Each is called once, with tensors of *all* positions, so `if`, `and` and `min` do not work: write `&`, `|`,
# comparisons and arithmetic on tensors. For example, each query sees itself and every third key before it:

# %%
import warnings
from functools import partial

from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")


def every_third(b, h, q_idx, kv_idx):
    distance = q_idx - kv_idx
    return (distance >= 0) & (distance % 3 == 0)


plotting.plot_weights({"every third": create_mask(every_third, None, None, 12, 12, "cpu")[0, 0]})


# %% [markdown]
# ## Exercise 2-7 · Mods, and the tiles that they hide
# ●●○ · 25 minutes · 5 bonus points
#
# ### Step 1 · Three masks · 10 minutes
#
# There are as many queries as keys. Extra arguments come first: `partial(window_mask, 4)` makes a mod of it.
#
# | function | `True` where query `q_idx` may see key `kv_idx` |
# | --- | --- |
# | `causal_mask(b, h, q_idx, kv_idx)` | the key is the query's own or comes before it |
# | `window_mask(window, b, h, q_idx, kv_idx)` | the same, and it is at most `window` places before the query |
# | `document_mask(ids, b, h, q_idx, kv_idx)` | causal, and both belong to the same document. `ids`, `(batch, seqlen)`, has the number of each token's document |
#
# The indices are integer tensors that can be broadcast to `(batch, heads, seqlen, seqlen)`.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Each row of the table is one comparison, or two with "and" between them.
#
# <details><summary>Hint 2: the idea</summary>
#
# `&` binds more strongly than `<=`: put each comparison into parentheses. You can look an index up in a tensor, with
# one index for each of its dimensions.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# causal_mask:   the key's index is not larger than the query's
# window_mask:   causal, and the distance from key to query is not larger than window
# document_mask: causal, and ids at (text, query) equals ids at (text, key)
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-7-masks", "locked": false, "schema_version": 3, "solution": true, "task": false}
def causal_mask(b, h, q_idx, kv_idx):
    """True for the query's own key, and those before it."""
    ### BEGIN SOLUTION
    return kv_idx <= q_idx
    ### END SOLUTION


def window_mask(window, b, h, q_idx, kv_idx):
    """Causal, and at most `window` places back."""
    ### BEGIN SOLUTION
    return (kv_idx <= q_idx) & (q_idx - kv_idx <= window)
    ### END SOLUTION


def document_mask(ids, b, h, q_idx, kv_idx):
    """Causal, within one document."""
    ### BEGIN SOLUTION
    return (ids[b, q_idx] == ids[b, kv_idx]) & (kv_idx <= q_idx)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-7-masks-window", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_causal_mask(causal_mask)
checks.check_window_mask(window_mask)
### BEGIN HIDDEN TESTS
checks.check_window_mask(window_mask, seed=71)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-7-masks-documents", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_document_mask(document_mask)
### BEGIN HIDDEN TESTS
checks.check_document_mask(document_mask, seed=72)
### END HIDDEN TESTS

# %% [markdown]
# ### Step 2 · Two changes of the scores · 5 minutes
#
# | function | returns |
# | --- | --- |
# | `soft_cap(cap, score, b, h, q_idx, kv_idx)` | $c \tanh(s / c)$: small scores stay, large ones approach the cap $c$ (Gemma 2) |
# | `alibi(slopes, score, b, h, q_idx, kv_idx)` | the score minus the head's slope times the distance of query and key, $\lvert i - j \rvert$. `slopes` is `(heads,)` |
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which of the four indices does each of them need?
#
# <details><summary>Hint 2: the idea</summary>
#
# `torch.tanh` works on tensors. Index the slopes by the number of the head; `abs()` is a method.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# soft_cap: divide by cap, tanh, multiply by cap
# alibi:    score minus (this head's slope times the absolute difference of the two positions)
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-7-scores", "locked": false, "schema_version": 3, "solution": true, "task": false}
def soft_cap(cap, score, b, h, q_idx, kv_idx):
    """The score, bent towards the limits -cap and cap."""
    ### BEGIN SOLUTION
    return cap * torch.tanh(score / cap)
    ### END SOLUTION


def alibi(slopes, score, b, h, q_idx, kv_idx):
    """The score, less a penalty for distance."""
    ### BEGIN SOLUTION
    return score - slopes[h] * (q_idx - kv_idx).abs()
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-7-scores-cap", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_soft_cap(soft_cap)
### BEGIN HIDDEN TESTS
checks.check_soft_cap(soft_cap, seed=73)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-7-scores-alibi", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_alibi(alibi)
### BEGIN HIDDEN TESTS
checks.check_alibi(alibi, seed=74)
### END HIDDEN TESTS

# %% [markdown]
# Now compare `flex_attention` with your mods against the same options of the lab's `attention`, and the cap against its
# formula, since `attention` has no cap. (One side takes SDPA's layout, the other flash-attn's.)

# %%
from labsupport.attention import attention, attention_varlen

names = ("causal_mask", "window_mask", "document_mask", "soft_cap", "alibi")
mods = {
    name: checks.solution_or_reference(
        globals()[name], getattr(checks.ex_2_7_flex, name), getattr(checks, f"check_{name}")
    )
    for name in names
}
seqlen, cuts = 64, [0, 20, 44, 64]  # three documents
ids_of = torch.arange(3, device=device).repeat_interleave(torch.tensor(cuts).diff().to(device))[
    None
]
slopes, cap = 2.0 ** -torch.arange(1, 5, device=device), torch.tensor(5.0, device=device)
window = torch.tensor(8, device=device)
generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 1, seqlen, 4, 16, generator=generator).to(device)


def flex(mask=None, score=None):
    tiles = mask and create_block_mask(mask, 1, None, seqlen, seqlen, device.type, BLOCK_SIZE=16)
    q_h, k_h, v_h = (x.transpose(1, 2) for x in (q, k, v))
    return flex_attention(q_h, k_h, v_h, score_mod=score, block_mask=tiles).transpose(1, 2)


scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4
offsets = torch.tensor(cuts, device=device, dtype=torch.int32)
packed = [x[0] for x in (q, k, v)]
pairs = {
    "window of 8": (
        flex(partial(mods["window_mask"], window)),
        attention(q, k, v, causal=True, window_size=(8, 0)),
    ),
    "documents": (
        flex(partial(mods["document_mask"], ids_of)),
        attention_varlen(*packed, offsets, offsets, causal=True)[None],
    ),
    "ALiBi": (
        flex(mods["causal_mask"], partial(mods["alibi"], slopes)),
        attention(q, k, v, causal=True, alibi_slopes=slopes),
    ),
    "soft cap": (
        flex(score=partial(mods["soft_cap"], cap)),
        torch.einsum("bhij,bjhd->bihd", (5 * (scores / 5).tanh()).softmax(-1), v),
    ),
}
for name, (ours, theirs) in pairs.items():
    print(f"{name:12} largest difference {(ours - theirs).abs().max():.0e}")
seen = {"window of 8": partial(mods["window_mask"], window)}
seen["three documents"] = partial(mods["document_mask"], ids_of)
plotting.plot_weights(
    {
        name: create_mask(m, 1, 1, seqlen, seqlen, device.type)[0, 0].cpu()
        for name, m in seen.items()
    }
)


# %% [markdown]
# ### Step 3 · Which tiles can be skipped? · 10 minutes
#
# A mask alone saves nothing: evaluating it for each pair costs as much as the pair. `create_block_mask` evaluates it
# once, beforehand, and notes for each *tile* whether nothing, a part or all of it is visible. The kernel then skips the
# tile, masks it, or computes it without the mask. Write this count.
#
# | `tile_counts(mask, block_q, block_k)` | |
# | --- | --- |
# | `mask` | `(seqlen_q, seqlen_k)`, boolean |
# | `block_q`, `block_k` | rows and columns of a tile; the last tiles may reach beyond the mask; pairs beyond it count as hidden |
# | returns | three integers: skipped tiles, tiles that need the mask, and fully visible tiles |
#
# <details><summary>Hint 1: a nudge</summary>
#
# How many pairs of a tile are visible? Two of the possible numbers are special.
#
# <details><summary>Hint 2: the idea</summary>
#
# `split` along one dimension and then along the other cuts a matrix into tiles. Tiles at the ends may be smaller;
# compare their sum with the size of a whole tile.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# for each block of rows, and in it each block of columns:
#     seen = number of True
#     0: skipped; block_q times block_k: full; anything else: masked
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-7-tiles", "locked": false, "schema_version": 3, "solution": true, "task": false}
def tile_counts(mask, block_q, block_k):
    """Tiles that are skipped, that need the mask, and that are full."""
    ### BEGIN SOLUTION
    more = (0, -mask.shape[1] % block_k, 0, -mask.shape[0] % block_q)
    tiles = F.pad(mask, more).unflatten(1, (-1, block_k)).unflatten(0, (-1, block_q))
    seen = tiles.sum((1, 3))
    skipped, full = int((seen == 0).sum()), int((seen == block_q * block_k).sum())
    return skipped, seen.numel() - skipped - full, full
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-7-tiles-counts", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_tile_counts(tile_counts)
### BEGIN HIDDEN TESTS
checks.check_tile_counts(tile_counts, seed=75)
### END HIDDEN TESTS

# %% [markdown]
# PyTorch's count for the three documents, and yours:

# %% tags=["nbval-check-output"]
by_documents = partial(mods["document_mask"], ids_of.cpu())
tiles = create_block_mask(by_documents, 1, None, seqlen, seqlen, "cpu", BLOCK_SIZE=8)
dense = create_mask(by_documents, 1, None, seqlen, seqlen, "cpu")[0, 0]
own_counts = checks.solution_or_reference(
    tile_counts, checks.ex_2_7_flex.tile_counts, checks.check_tile_counts
)
masked, full = int(tiles.kv_num_blocks.sum()), int(tiles.full_kv_num_blocks.sum())
print("PyTorch:", (64 - masked - full, masked, full), "yours:", own_counts(dense, 8, 8))

# %%
plotting.plot_block_mask(tiles)

# %% [markdown]
# ## When is it compiled again?
#
# So far you ran no fused kernel: without `torch.compile`, `flex_attention` computes all scores, as the textbook does,
# which is enough to try mods out. `torch.compile(flex_attention)` makes the kernel, in seconds. When does it compile
# again? Guess for each line of the next cell, where a function that counts its calls replaces the compiler:

# %%
predicted_compilations = None  # five numbers of 0 or 1, such as (1, 0, 0, 0, 0)

# %% tags=["nbval-check-output"]
compilations = []


def counting(graph, inputs):
    compilations.append(graph)
    return graph


compiled = torch.compile(flex_attention, backend=counting)
print("you predicted:", predicted_compilations)
for name, back, rows in (
    ("the first call, window 8 as an integer", 8, 64),
    ("the same again", 8, 64),
    ("window 9", 9, 64),
    ("window 8 as a tensor", torch.tensor(8), 64),
    ("window 9 as a tensor", torch.tensor(9), 64),
):
    before, x = len(compilations), torch.randn(1, 2, rows, 16)
    mod = partial(mods["window_mask"], back)
    tiles = create_block_mask(mod, None, None, rows, rows, "cpu", BLOCK_SIZE=16)
    compiled(x, x, x, block_mask=tiles)
    print(f"{name}: {len(compilations) - before}")


# %% [markdown]
# A mod's code, and the Python numbers that it captures, are compiled in: another number needs another compilation.
# (After the second one, PyTorch treats an integer as a variable; a captured `float` was refused with an error in
# version 2.13.) A captured *tensor* is an input, so its values may change. Other shapes, dtypes and devices compile
# again, too. So make a mod once, capture tensors, and keep a block mask as long as the mask is the same: with
# documents, make one for each batch. On a CPU FlexAttention has no backward pass. Further reading: [chapter
# 10](../../theory/10-field-guide.md#choose), on when to choose `flex`, and [Dong 2024](../../theory/references.md).

# %% [markdown]
# ## A mask that leaks
#
# The program of notebook 1, section 1.10: each token looks for similar tokens *at least* `gap` places before it, and no
# other token may see the last one.
#
# ![For a gap of 3, token 3 may look at token 0, token 7 at tokens 0 to 4, and the first three tokens at none.](../../theory/figures/gap-mask.png)


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
# ## Exercise 1-8 · A token sees the future
# ●●○ · 12 minutes · 3 bonus points
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


# %% nbgrader={"grade": true, "grade_id": "ex-1-8-cause-letter", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_leak_cause(cause)

# %% nbgrader={"grade": true, "grade_id": "ex-1-8-fault-rows", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_leaking_rows(rows_that_leak)
### BEGIN HIDDEN TESTS
checks.check_leaking_rows(rows_that_leak, seed=81)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-1-8-fault-output", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_recall(repaired)
### BEGIN HIDDEN TESTS
checks.check_recall(repaired, seed=82)
### END HIDDEN TESTS

# %% [markdown]
# A program with this fault passes most tests: its loss goes down, its shapes are right, and only the first few rows
# are wrong. To find a leak, *change* one input and look at what else changes. This works for any mask and any model.
