# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Serving many requests: parts, pages, eight bits
#
# **Time** about 40 minutes. **You need** notebook 2 up to section 2.8.
# **Exercise** 2-6, steps 2 and 3, 4 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [9, Inference](../../theory/09-inference.md#paging-continuous-batching-speculation).

# %%
import torch
import transformers

from labsupport import checks, models
from labsupport.attention import oracle_attention
from labsupport.profiling import environment_card, load_run

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
environment_card()

# %% [markdown]
# In notebook 2 a decode step hardly gained from FlashAttention. What does a serving program do instead? It reads the
# weights once for many requests, starts fewer kernels, reads the cache with the whole GPU, and stores it without waste.
#
# ## Around the arithmetic
#
# A Llama of 110 million parameters in bfloat16 serves one request on an H200. (Its weights are random, which does not
# change the time.) *Bound* is the rate at which the memory could deliver weights and cache. An ordinary loop starts several
# hundred kernels for each token from Python. A *CUDA graph* records one whole step, and replays it with one call. Guess:
# how many times as many tokens per second does it bring?

# %%
predicted_graph = None  # your guess, a number

# %% tags=["nbval-check-output"]
decode = load_run("generation-h200")
decode = decode[decode.batch == 1].set_index("name")
decode = decode[["median_ms", "tokens_per_s", "ceiling"]].rename(
    columns={"median_ms": "ms a step", "tokens_per_s": "tokens/s", "ceiling": "bound, tokens/s"}
)
rates = decode["tokens/s"]
times = rates["graphed"] / rates["transformers, dynamic cache"]
checks.compare_prediction("Graph over loop", predicted_graph, times, "times")
print(decode.round({"ms a step": 2, "tokens/s": 0, "bound, tokens/s": 0}).to_string())


# %% [markdown]
# All rows compute the same. The difference between 110 and 4,600 tokens a second is everything *around* the arithmetic.
# `graphed` (`labsupport/models/generation/cuda_graph.py`) replays one graph for each token, the choice of the token
# included; Transformers' compiled step, with its static cache, writes 600.
#
# For 64 requests together, `graphed` writes 94,000 tokens a second: all of them share one reading of the weights. But each
# has a cache of its own, so with long texts a batch helps less, until the memory is full:
#
# ![Left, prefill and decode under the roof of an H200; right, tokens per second at most against the batch: batching lifts the linear layers, but not attention.](../../theory/figures/inference-bounds.png)
#
# The cache decides how many requests a server can take. So read it fast, and store it small.
#
# ## Exercise 2-6 · Steps 2 and 3: parts, pages, 8 bits
# ●●○ · useful · 30 minutes · 4 bonus points
#
# ### Step 2 · Decode in parts · 18 minutes
#
# Section 2.8 of notebook 2 showed why keys are read in parts: one program for each head leaves most of a GPU idle. With the
# log-sum-exp $L_p = \log \sum_{j \in p} e^{s_j}$ of each part $p$, and its output $o_p$, the merge is exact:
#
# $$o = \sum_p w_p\, o_p, \qquad w_p = \frac{e^{L_p}}{\sum_{p'} e^{L_{p'}}}$$
#
# Write `split_decode(q, k, v, num_splits)` in PyTorch operations: `q` is `(heads, 1, head_dim)`, `k` and `v` are
# `(heads, seqlen_k, head_dim)`; the result has the shape of `q`. Attend to each of `num_splits` parts of the keys
# separately, and merge. `num_splits` need not divide `seqlen_k`, and may be larger.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Store two things for each part: its output, and one number for each head.
#
# <details><summary>Hint 2: the idea</summary>
#
# `k.tensor_split(num_splits, 1)` cuts into parts of nearly equal size; skip the empty ones. The weights $w_p$ are a
# softmax over the parts' log-sum-exps: `torch.softmax` subtracts the maximum for you.
#
# <details><summary>Hint 3: an outline</summary>
#
# For each part: `scores` = q Kᵀ / √head_dim, `lse` = its `logsumexp` (with `keepdim=True`), output =
# `exp(scores - lse)` V. Stack outputs and log-sum-exps along a new first dimension, take `softmax` of the log-sum-exps
# along it, multiply, and add up.
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-6-split", "locked": false, "schema_version": 3, "solution": true, "task": false}
def split_decode(q, k, v, num_splits):
    """Attention of one query a head to all keys, computed in parts."""
    ### BEGIN SOLUTION
    outs, lses = [], []
    for k_part, v_part in zip(
        k.tensor_split(num_splits, 1), v.tensor_split(num_splits, 1), strict=True
    ):
        if k_part.shape[1] == 0:
            continue
        scores = q @ k_part.mT / q.shape[-1] ** 0.5
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append((scores - lse).exp() @ v_part)
        lses.append(lse)
    lse = torch.stack(lses)
    weights = torch.softmax(lse, 0)
    return (weights * torch.stack(outs)).sum(0)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-6-split-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_split_decode(split_decode)
### BEGIN HIDDEN TESTS
checks.check_split_decode(split_decode, seed=33)
### END HIDDEN TESTS

# %% [markdown]
# ### Step 3 · Pages, and 8 bits · 12 minutes
#
# A server does not know how long an answer becomes, and buffers for the longest case would waste most of the memory. So
# it cuts memory into *pages* of 16 tokens, and each text has a table of its pages:
#
# ![A pool of eight pages. Text A lies in pages 5, 0 and 7, text B in pages 2 and 6, each in the order of its table; three pages are free.](../../theory/figures/kv-pages.png)
#
# Write:
#
# - `gather_pages(pool, table, length)`: `pool` is `(pages, 16, kv_heads, head_dim)`, `table` lists the pages of one
#   text in order; return its first `length` tokens, `(length, kv_heads, head_dim)`.
# - `quantise_keys(k)`: `k` is `(heads, seqlen, head_dim)`. Return `codes` in int8, from -127 to 127, and for each head
#   a `scale`, `(heads, 1, 1)`, so that `codes * scale` is about `k`. The head's largest absolute value becomes 127.
#
# <details><summary>Hint 1: a nudge</summary>
#
# A tensor of indices between brackets picks rows, in any order. Over which dimensions do you take a head's largest value?
#
# <details><summary>Hint 2: the idea</summary>
#
# `pool[table]` is `(len(table), 16, kv_heads, head_dim)`: merge the first two dimensions. `amax` takes several
# dimensions, and `keepdim=True`.
#
# <details><summary>Hint 3: an outline</summary>
#
# `pool[table].flatten(0, 1)`, then the first `length` rows. `scale` = the largest absolute value / 127; `codes` =
# `(k / scale)`, rounded, then `.to(torch.int8)`.
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-6-store", "locked": false, "schema_version": 3, "solution": true, "task": false}
def gather_pages(pool, table, length):
    """The first `length` tokens of the text whose pages `table` lists."""
    ### BEGIN SOLUTION
    return pool[table].flatten(0, 1)[:length]
    ### END SOLUTION


def quantise_keys(k):
    """Codes in int8, and the scale of each head."""
    ### BEGIN SOLUTION
    scale = k.abs().amax((1, 2), keepdim=True) / 127
    return (k / scale).round().clamp(-127, 127).to(torch.int8), scale
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-6-store-pages", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_gather_pages(gather_pages)
### BEGIN HIDDEN TESTS
checks.check_gather_pages(gather_pages, seed=34)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-6-store-codes", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_quantise_keys(quantise_keys)
### BEGIN HIDDEN TESTS
checks.check_quantise_keys(quantise_keys, seed=35)
### END HIDDEN TESTS

# %% [markdown]
# Now your functions meet SmolLM2's own keys. What do 8 bits cost in accuracy, compared with bfloat16, which takes twice
# the bytes? And does the text survive when it is scattered over pages?

# %%
smollm2 = models.load_model("smollm2", attention="flash", dtype=torch.float32, device=device)
ids = models.tokens_of(smollm2.tokenizer, models.source_text("argparse"), 256).to(device)
with torch.inference_mode():
    cache = smollm2.model(ids, use_cache=True, logits_to_keep=1).past_key_values
keys, values = (x[0].float() for x in (cache.layers[-1].keys, cache.layers[-1].values))
query = keys[:, -1:]  # any vector of the right size
exact = oracle_attention(query, keys, values)[0]
own = {
    name: checks.solution_or_reference(
        globals()[name], getattr(checks.ex_2_6_cache, name), getattr(checks, check)
    )
    for name, check in (
        ("split_decode", "check_split_decode"),
        ("gather_pages", "check_gather_pages"),
        ("quantise_keys", "check_quantise_keys"),
    )
}

# %%
quantise_keys = own["quantise_keys"]
codes, scale = quantise_keys(keys)
for name, rounded in {"int8": codes * scale, "bfloat16": keys.bfloat16().float()}.items():
    out = oracle_attention(query, rounded, values)[0]
    error = (rounded - keys).norm() / keys.norm()
    print(f"{name:9} keys {error:.2%} off, output {(out - exact).norm() / exact.norm():.2%} off")
table = torch.randperm(16)  # 256 tokens in 16 pages, in any order
pool = torch.empty(16, 16, *keys[:, 0].shape, device=device)
pool[table] = keys.transpose(0, 1).unflatten(0, (16, 16))
paged = own["gather_pages"](pool, table, 250).transpose(0, 1)
out = own["split_decode"](query, paged, values[:, :250], 4)
right = oracle_attention(query, keys[:, :250], values[:, :250])[0]
print(f"from pages, in 4 parts: at most {(out - right).abs().max():.0e} off")

# %% [markdown]
# bfloat16 has 8 significant bits at every size. int8 has 7 and a sign for the head's largest number, and fewer for
# smaller ones, so one outlier makes all other keys of its head less precise. That is why serving programs use a scale
# for each channel or for small blocks. [Chapter 9](../../theory/09-inference.md#paging-continuous-batching-speculation)
# continues from here.
