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
# **Time** about 30 minutes. **You need** notebook 2 up to section 2.6.
# **Exercise** 2-7, 5 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [10, Field guide](../../theory/10-field-guide.md#choose).

# %%
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
