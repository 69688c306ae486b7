# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2 · FlashAttention inside real models
#
# In notebook 1 you wrote FlashAttention as a loop over tiles. Here it computes the attention in all 30 layers of a
# language model. Does the model still know the capital of France?
#
# **After this notebook you can**
#
# - exchange the attention of a Transformers model, and prove that nothing else changed;
# - say which kernel ran in which layer;
# - measure what a *whole* model gains, and explain why it isn't more;
# - place the causal mask when keys outnumber queries, and write a key/value cache;
# - find the first NaN in a deep model, and choose dtypes.
#
# **Time**: about 150 minutes (estimated), of which the exercises take 105. A good place to pause: after 2.4.
#
# **You need** notebook 1, some experience with Hugging Face Transformers, and a laptop.
#
# **Theory**, not required: chapter [9](../theory/09-inference.md), and the [glossary](../theory/glossary.md).
#
# **Exercises**: 2-1, 2-2, 2-3, 2-6, 2-8 (other numbers: bonus, in `further/`). Stored results come from the solutions.

# %%
import torch
import torch.nn.functional as F
import transformers

from labsupport import checks, models, plotting
from labsupport.attention import flash_attention
from labsupport.profiling import environment_card

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
lengths = [512, 1024, 2048, 4096] if device.type == "cuda" else [256, 512, 1024]
environment_card()

# %% [markdown]
# ## 2.1 · Your loop says Paris
#
# SmolLM2-135M-Instruct is a small Llama with 135 million parameters: 30 layers, 9 query heads that share 3 key/value
# heads (*grouped heads*), head_dim 64, up to 8,192 tokens. `make lab` has fetched it.

# %%
smollm2 = models.load_model("smollm2", attention=None, dtype=torch.float32, device=device)
model, tokenizer = smollm2.model, smollm2.tokenizer
print(smollm2.source)

# %% [markdown]
# Each layer calls an attention function. The lab's `set_attention` and Transformers' `set_attn_implementation` choose
# it (section 2.3). The next cell makes your `my_flash_forward` that function: exercise 1-4, from your saved notebook 1.

# %%
from labsupport.attention import register_backend
from labsupport.attention.flash_torch import flash_attention_forward
from labsupport.course.own import solution_of

loops = checks.solution_or_reference(
    solution_of("1-4", "my_flash_forward"),
    lambda q, k, v, c, bq, bk: flash_attention_forward(q, k, v, c, block_q=bq, block_k=bk),
    checks.check_forward_values,
    checks.check_forward_edges,
)
register_backend("loops", lambda q, k, v, causal: loops(q, k, v, causal, 64, 64)[0])
models.set_attention(model, "loops")
question = "What is the capital of France?"
print(models.generate(model, tokenizer, question, chat=True, max_new_tokens=16).text)

# %% [markdown]
# The model says *Paris*. Change `question` and ask something else. (*Decoding* means writing token
# by token.)
#
# Does the model compute the same as with its own attention? One answer proves little. So let it read a text, a file of
# Python's standard library, and measure how well it predicts each next token. The *negative log-likelihood*, NLL, is
# the mean of $-\ln p(\text{next token})$, in nats a token. Guessing among 49,152 tokens costs $\ln 49{,}152 = 10.8$.

# %%
ids = models.tokens_of(tokenizer, models.source_text("argparse"), lengths[-1]).to(device)
nll = {"loops": models.negative_log_likelihood(model, ids[:, :256])}
model.set_attn_implementation("eager")
nll["eager"] = models.negative_log_likelihood(model, ids[:, :256])
for name, nats in nll.items():
    print(f"{name}: NLL {nats:.6f} nats a token")

# %% [markdown]
# `eager` is Transformers' own textbook attention, which stores all scores. **It is the baseline for a model's time and
# memory here.**
#
# Your loop is exact, and slow: Python starts each small operation separately. A kernel doesn't. To put one into a
# model, you need two layouts.

# %% [markdown]
# ## 2.2 · Two layouts
#
# A projection gives each token one long vector, head beside head. Two layouts are common after that:
#
# | layout | shape | who uses it |
# | --- | --- | --- |
# | flash-attn's | `(batch, seqlen, heads, head_dim)` | flash-attn, this lab |
# | SDPA's | `(batch, heads, seqlen, head_dim)` | PyTorch, Transformers |
#
# ![A token's vector, read in two orders: token by token, or head by head.](../theory/figures/layouts.png)
#
# Converting moves nothing in memory: a *view* with other strides is enough. But `reshape` gives the right shape and the
# wrong data: it mixes up heads and tokens, without an error:

# %% tags=["nbval-check-output"]
x = torch.arange(2 * 3 * 2).view(1, 2, 3, 2)  # (batch, heads, seqlen, head_dim)
print("head 0:", x[0, 0].tolist(), "  head 1:", x[0, 1].tolist())
print("token 0, transposed:", x.transpose(1, 2)[0, 0].tolist())
print("token 0, reshaped:  ", x.reshape(1, 3, 2, 2)[0, 0].tolist(), "<- two tokens of head 0")


# %% [markdown]
# ### Exercise 2-1 · From a model's tensors to flash-attn's layout
# ●○○ · essential · 15 minutes · 4 points
#
# Copy nothing: every result is a *view* of the argument's memory; kernels read strided tensors.
#
# | function | takes | returns |
# | --- | --- | --- |
# | `split_heads(x, heads)` | `x`: `(batch, seqlen, heads * head_dim)`, the output of a projection | `(batch, seqlen, heads, head_dim)` |
# | `to_flash_layout(x)` | `x`: `(batch, heads, seqlen, head_dim)`, as Transformers passes it to attention | `(batch, seqlen, heads, head_dim)` |
# | `split_qkv(qkv, heads, kv_heads)` | `qkv`: `(batch, seqlen, (heads + 2 * kv_heads) * head_dim)`, one projection for all: first all heads of q, then all of k, then all of v | `q`: `(batch, seqlen, heads, head_dim)`; `k` and `v`: `(batch, seqlen, kv_heads, head_dim)` |
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which dimension must be cut, and into what? Which two must change places? See the picture above.
#
# <details><summary>Hint 2: the idea</summary>
#
# `view` and `unflatten` cut or join neighbouring dimensions; `transpose` swaps two. Both ways can give the same
# shape, so the shape does not tell you which is right. `split` takes a list of widths, which may differ.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# split_heads: cut the last dimension into (heads, the rest); -1 stands for the rest
# to_flash_layout: swap dimensions 1 and 2
# split_qkv: head_dim = the width over the number of all heads, of q, k and v
#            cut the last dimension into three widths, then split the heads of each
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-1-layout", "locked": false, "schema_version": 3, "solution": true, "task": false}
def split_heads(x, heads):
    """(batch, seqlen, heads * head_dim) as (batch, seqlen, heads, head_dim)."""
    ### BEGIN SOLUTION
    return x.unflatten(-1, (heads, -1))
    ### END SOLUTION


def to_flash_layout(x):
    """(batch, heads, seqlen, head_dim) as (batch, seqlen, heads, head_dim)."""
    ### BEGIN SOLUTION
    return x.transpose(1, 2)
    ### END SOLUTION


def split_qkv(qkv, heads, kv_heads):
    """One projection as q, k, v in flash-attn's layout."""
    ### BEGIN SOLUTION
    head_dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = qkv.split(widths, dim=-1)
    return split_heads(q, heads), split_heads(k, kv_heads), split_heads(v, kv_heads)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-1-layout-heads", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_split_heads(split_heads)
### BEGIN HIDDEN TESTS
checks.check_split_heads(split_heads, seed=11)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-1-layout-flash", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_flash_layout(to_flash_layout)
### BEGIN HIDDEN TESTS
checks.check_flash_layout(to_flash_layout, seed=12)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-1-layout-qkv", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_split_qkv(split_qkv)
### BEGIN HIDDEN TESTS
checks.check_split_qkv(split_qkv, seed=13)
### END HIDDEN TESTS

# %% [markdown]
# ## 2.3 · The same weights, another attention
#
# Many tutorials say `use_flash_attn=True` makes a Transformers model use FlashAttention. Try it:

# %% tags=["nbval-check-output"]
from transformers import GPT2Config, GPT2LMHeadModel

tiny = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 100}
asked = GPT2LMHeadModel(GPT2Config(use_flash_attn=True, **tiny))
plain = GPT2LMHeadModel(GPT2Config(**tiny))
print("the configuration says:", asked.config.use_flash_attn)
same = asked.config._attn_implementation == plain.config._attn_implementation
print("the same attention as without it:", same)


# %% [markdown]
# A configuration stores every name, even one that nothing reads: no error, no effect.
#
# What works is `model.set_attn_implementation(name)`. It chooses from a table of attention functions, to which you can
# add your own:
#
# ![The layers of a model call one function of a table: tensors go in as (batch, heads, seqlen, head_dim) and come back as (batch, seqlen, heads, head_dim).](../theory/figures/attention-table.png)

# %% [markdown]
# ### Exercise 2-2 · Your own attention in a Transformers model
# ●●○ · essential · 30 minutes · 6 points
#
# Write an attention function for Transformers that calls `flash_attention`. Its arguments:
#
# | argument | type or shape | meaning |
# | --- | --- | --- |
# | `module` | the model's attention layer | `module.is_causal` says whether the future is hidden |
# | `query` | `(batch, heads, seqlen_q, head_dim)` | in decoding, the *last* `seqlen_q` tokens |
# | `key`, `value` | `(batch, kv_heads, seqlen_k, head_dim)` | `kv_heads` may be smaller than `heads` |
# | `attention_mask` | a tensor, or `None` | `None` when no prompt is padded |
# | `scaling` | a number, or `None` | factor on the scores; `None` means $1/\sqrt d$, as for `softmax_scale` |
# | `dropout` | a number | 0 in inference |
# | `is_causal`, in `kwargs` | `True`, `False`, `None`, or absent | if `True` or `False`, use it instead of `module.is_causal` |
#
# Return the output, `(batch, seqlen_q, heads, head_dim)`, and `None` in the place of the attention weights.
#
# `flash_attention(q, k, v, causal=..., softmax_scale=...)` takes flash-attn's layout and grouped heads, and aligns a
# causal mask at the bottom right: the last query sees all keys. It takes neither masks nor dropout, so raise a
# `ValueError` when `attention_mask` is not `None`, or `dropout` is not 0.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Three things differ between the two sides: the layout, the names, and who decides about causality.
#
# <details><summary>Hint 2: the idea</summary>
#
# Convert as in exercise 2-1. The output of `flash_attention` already has the right layout. Write
# `kwargs.get("is_causal")`, and use `module.is_causal` when that is `None`.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# raise ValueError if there is a mask, or if dropout is not 0
# causal = is_causal of the call; where that is None, the module's
# q, k, v = query, key, value in flash-attn's layout
# return flash_attention of them, with causal and the scale; and None
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-2-own-attention", "locked": false, "schema_version": 3, "solution": true, "task": false}
def lab_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Attention as Transformers calls it: (output, None), by flash_attention."""
    ### BEGIN SOLUTION
    if attention_mask is not None:
        raise ValueError("lab_attention takes no mask: give it texts without padding.")
    if dropout != 0:
        raise ValueError("lab_attention has no dropout: call model.eval().")
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = module.is_causal
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attention(q, k, v, causal=causal, softmax_scale=scaling), None
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-2-own-attention-values", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_registered_values(lab_attention)
checks.check_registered_models(lab_attention)
### BEGIN HIDDEN TESTS
checks.check_registered_values(lab_attention, seed=21)
checks.check_registered_models(lab_attention, seed=22)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-2-own-attention-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_registered_memory(lab_attention)

# %% nbgrader={"grade": true, "grade_id": "ex-2-2-own-attention-refusals", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_registered_refusals(lab_attention)
### BEGIN HIDDEN TESTS
checks.check_registered_refusals(lab_attention, seed=24)
### END HIDDEN TESTS

# %% [markdown]
# Now compare it with `eager` in SmolLM2. The logits, the scores of the 49,152 possible next tokens, lie between about
# -10 and 30.

# %%
from labsupport.models.integration.functions import backend_function

own = checks.solution_or_reference(
    lab_attention, backend_function("flash"), checks.check_registered_values
)
logits = {}
for name in ("eager", models.register_attention("mine", own)):
    model.set_attn_implementation(name)
    with torch.inference_mode():
        logits[name] = model(ids[:, :256]).logits
difference = (logits["mine"] - logits["eager"]).abs().max().item()
print(f"largest difference of {logits['mine'].numel():,} logits: {difference:.0e}")

# %% [markdown]
# They agree up to the rounding of float32.
#
# > **A common error.** To register a function under a name with "flash" in it: Transformers then looks for a kernel on
# > its hub. `models.register_attention` refuses such names.
#
# ### Padding: the mistake without an error
#
# In a batch, *padding* fills short prompts up. If a function ignores the mask, real tokens look at the padding. Yours
# takes no mask, so it must refuse one.
#
# ![Two prompts in one batch, the short one filled up on its left: without a mask its tokens look at the padding.](../theory/figures/padding.png)
#
# In Transformers this mistake is easy to make: a second table must hold a function that *makes masks*. Without it there
# is no mask, and no error. What does the model say to the short prompt, "The capital of Italy is", in a batch with a
# longer one?

# %%
from transformers import AttentionInterface


def ignores_padding(module, query, key, value, attention_mask, scaling=None, **kwargs):
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register("ignores_padding", ignores_padding)
prompts = ["The capital of Italy is", "Once upon a time, in a small house by the sea, there lived"]
tokenizer.padding_side = "left"


def first_logits(texts):
    """Logits of the token after the first text."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(device)
    positions = (inputs.attention_mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        return model(**inputs, position_ids=positions).logits[0, -1]


def alone_and_padded():
    alone, padded = first_logits(prompts[:1]), first_logits(prompts)
    said = [repr(tokenizer.decode(logits.argmax())) for logits in (alone, padded)]
    print(f"alone {said[0]}, padded {said[1]}; largest change {(alone - padded).abs().max():.1g}")


model.set_attn_implementation("ignores_padding")
alone_and_padded()

# %% [markdown]
# Alone it says *Rome*; beside a longer prompt, only *a*, and a logit changes by about 20. `models.set_attention(model,
# backend)` fills both tables. It takes the lab's own names (to Transformers it gives others): any backend of notebook
# 1, or `"flash"`, the best one here that never stores the N × N scores. `set_attention` cuts padding out, refuses what
# a backend cannot do, with reasons, and records what really ran:

# %%
models.set_attention(model, "flash")
alone_and_padded()
print(models.attention_used(model))

# %% [markdown]
# ## 2.4 · Reading a long text
#
# In notebook 1, attention *alone* became several times as fast. Guess: how many times as fast does the *whole model*
# read the longest text?

# %%
predicted_gain = None  # your guess, a number, before you run the next cell

# %%
from labsupport.profiling import speedup


def nothing(module, query, key, value, attention_mask, **kwargs):
    """No attention at all: its text is nonsense, its time is that of everything else."""
    return query.transpose(1, 2).clone(), None


models.register_attention("nothing", nothing)
reading = models.measure_model(model, ids, lengths=lengths, max_seconds=0.3)  # up to a minute
reading = speedup(reading, over="eager")
bare = models.measure_model(
    model, ids, attentions=["nothing"], lengths=lengths[-1:], max_seconds=0.3
)
gain = reading[reading.seqlen == lengths[-1]].set_index("backend").speedup["flash"]
checks.compare_prediction("Gain of the whole model", predicted_gain, gain, "times")
columns = ["seqlen", "backend", "median_ms", "tokens_per_s", "speedup", "loss"]
reading[columns].round({"median_ms": 0, "tokens_per_s": 0, "speedup": 2, "loss": 5})

# %% [markdown]
# The last column, the NLL, is the control: at each length both attentions agree. The gain grows with the length.
# Recorded on a quiet machine (on a busy one, ratios can be anything):
#
# ![SmolLM2's time to read a text on two CPU cores: with FlashAttention the whole model is 2.0 times as fast at 1,024 tokens, and 4.6 times at 8,192.](../theory/figures/model-gain.png)
#
# The memory does not depend on what else is running:

# %%
peak = reading[reading.seqlen == lengths[-1]].set_index("backend").peak_memory_bytes
plotting.plot_memory(
    reading,
    title=f"{lengths[-1]:,} tokens: eager needs {peak['eager'] / peak['flash']:.1f} times the memory",
    references=[plotting.Reference("S and P of one layer", lambda n: 2 * 9 * n**2 * 4 / 2**20)],
)

# %% [markdown]
# In a short text the logits and their softmax are largest: made for 128 tokens at a time, they need 48 MiB at any
# length. In a long one, $S$ and $P$ of *one* layer are: a forward pass has only one layer's in memory at a time.
# FlashAttention has no such term.
#
# ### Why not more?
#
# Attention is only a part of the model. If a part that takes the share $s$ of the time becomes $g$ times as fast, the
# whole gains (G. Amdahl, 1967):
#
# $$\text{gain} = \frac{1}{(1 - s) + s / g} \qquad \text{and at most} \qquad \frac{1}{1 - s}$$
#
# To find $s$, the cell above also measured an attention that does *nothing*. What remains is the time of everything
# else.

# %%
ms = reading[reading.seqlen == lengths[-1]].set_index("backend").median_ms
rest = bare.median_ms.item()
s = 1 - rest / ms.eager
g = (ms.eager - rest) / (ms.flash - rest)
if 0 < s < 1 and g > 1:
    print(f"attention takes {s:.0%} of the time with eager, and becomes {g:.1f} times as fast")
    print(f"gain by the formula: {1 / (1 - s + s / g):.2f}; the limit: {1 / (1 - s):.2f}")
else:
    print("Noise: other programs disturbed the measurement above. Run it again when they end.")

# %% [markdown]
# The gain by the formula must equal the measured one: $s$ and $g$ come from the same times. The limit is new: no
# kernel gains more here. A longer text can: attention's FLOPs grow with the square of the length, everything else
# only in proportion.
#
# ![Attention's share of the FLOPs against the length: half of them at 6,144 tokens for SmolLM2-135M, at 53,248 for Llama-3-8B.](../theory/figures/attention-share.png)
#
# This counts the pairs that a causal mask leaves. `eager` computes all $N^2$, so its half comes at 3,072 tokens.
# Its share of the *time* is larger still, since it also moves $S$ and $P$ through memory.
#
# ## 2.5 · Training, one text or eight
#
# Training must store what the backward pass needs, for all layers. The textbook stores its N × N weights $P$ in each.
# The next model is a GPT-2 with 4 layers that reads bytes. Its weights are random. That changes neither time nor
# memory. (Without dropout, which this lab refuses.) First, the gradients, beside those of `standard`, notebook 1's
# textbook attention:

# %%
sizes = {"n_layer": 4, "n_head": 8, "n_embd": 256, "vocab_size": 256, "n_positions": 4096}
no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout)).to(device).train()
text = "".join(models.python_topics().values()).encode()
texts = torch.tensor(list(text[: 8 * lengths[1]]), device=device).view(8, lengths[1])


def gradients(name):
    models.set_attention(gpt2, name)
    gpt2.zero_grad()
    gpt2(texts[:1, :256], labels=texts[:1, :256]).loss.backward()
    return torch.cat([p.grad.flatten() for p in gpt2.parameters()])


reference = gradients("standard")
error = (gradients("flash") - reference).norm() / reference.norm()
print(f"relative difference of all {reference.numel():,} gradients: {error:.0e}")

# %% [markdown]
# The gradients agree, so training does, too. Now its price, for 1 text and for 8 (backward: a step minus its forward):

# %%
import pandas as pd

parts = []
for batch in (1, 8):
    training_options = {"lengths": [lengths[1]], "max_seconds": 0.2}
    forward, step = (
        models.measure_model(gpt2, texts[:batch], direction=direction, **training_options)
        for direction in ("forward", "forward+backward")
    )
    step["forward, ms"], step["step, ms"] = forward.median_ms, step.median_ms
    step["backward, ms"] = step.median_ms - forward.median_ms
    step["extra memory, MiB"] = step.peak_memory_bytes / 2**20
    parts.append(speedup(step, over="eager"))
training = pd.concat(parts).rename(columns={"tokens_per_s": "tokens/s", "backend": "attention"})
columns = [
    "batch",
    "attention",
    "forward, ms",
    "backward, ms",
    "tokens/s",
    "speedup",
    "extra memory, MiB",
]
training[columns].round({"speedup": 2}).round(
    {name: 0 for name in columns if name not in ("speedup", "attention")}
)

# %% [markdown]
# With `eager`, $P$ of *all* layers waits for the backward pass: a square for each layer, head and text. So eight texts
# make the difference in memory eight times as large. FlashAttention stores one number a row, and computes the tiles
# again. The same comparison on a large GPU, with longer texts:

# %%
from labsupport.profiling import load_run

steps = load_run("gpt2-medium-h200").query("name in ['eager', 'sdpa_flash']")
steps = steps.rename(columns={"name": "backend"}).drop(columns="batch")
steps["direction"] = "forward+backward"
print(steps[steps.seqlen == 4096].set_index("backend").tokens_per_s.round(-3).to_dict())
plotting.plot_memory(
    steps,
    title="GPT-2 medium: with eager, a text of 8,192 tokens does not fit",
    references=[plotting.Reference("memory of the GPU", 139.8 * 1024)],
)

# %% [markdown]
# Each step reads 8,192 tokens: eight texts of 1,024, or four of 2,048, up to one of 8,192. FlashAttention needs the
# same memory for all. With `eager` it grows, until the card is full: the cross. The line above the chart has the tokens
# per second at 4,096.
#
# ## 2.6 · GPT, BERT, and other shapes
#
# A GPT writes from left to right: its mask is *causal*, and keeps $N(N+1)/2$ of the $N^2$ pairs.\
# A BERT reads in both directions: every token sees all others.\
# The layer says which of them it is (`module.is_causal`), so your function of exercise 2-2 serves both.
#
# Tile by tile, hidden tiles can be skipped. The textbook computes all pairs, and then hides half of them.
#
# ![Tiles of a causal mask: those above the diagonal are skipped, those on it need a mask.](../theory/figures/tiles-visited.png)

# %%
from labsupport.profiling import grid, run_grid

fused = "sdpa_flash" if device.type == "cpu" else "sdpa_efficient"  # takes float32 on a GPU, too
shape = {"heads": 8, "head_dim": 64, "causal": [False, True]}
cases = grid(["standard", fused], [1024], **shape)
masks = run_grid(cases, device=device, measure_error=False, max_seconds=0.4)
masks["GFLOPs needed"] = masks.tflops * masks.median_ms
masks["model"] = masks.causal.map({False: "like BERT", True: "like GPT"})
masks = masks.rename(columns={"median_ms": "time, ms"})
masks.pivot(index="backend", columns="model", values=["GFLOPs needed", "time, ms"]).round(1)

# %% [markdown]
# A causal call needs half of the GFLOPs. How much of the *time* goes away depends on the tiles: those on the
# diagonal are computed in full. The textbook saves nothing: hiding takes extra time.
#
# What else changes the gain? Recorded in one run:
#
# ![Recorded gains of FlashAttention alone over the textbook on one CPU core, when one property of the call changes.](../theory/figures/configurations.png)
#
# - **More heads, texts or tokens** mean more scores, which soon outgrow the processor's cache.
# - **A larger head dimension** means more arithmetic for each score, which both have to do.
# - **bfloat16** on a CPU speeds up the textbook's products, but hardly PyTorch's CPU kernel. On GPUs, FlashAttention is
#   made for half precision. Measure on yours.
#
# ## 2.7 · Generating text: two phases, and a cache
#
# To write the next token, a model needs the keys and values of all earlier tokens. These never change, because a causal
# mask keeps the past from looking ahead. The model stores them in the *KV cache*, and generation has two phases:
#
# | phase | queries | keys | |
# | --- | --- | --- | --- |
# | *prefill* | the whole prompt, $N$ | $N$ | once |
# | *decode* | 1, the newest token | all so far | once for each new token |
#
# ![Prefill: all queries meet all keys, a triangle. Decode: one query meets the whole cache, one row, and adds one key and value.](../theory/figures/prefill-decode.png)
#
# When decoding, there are more keys than queries. PyTorch's `is_causal=True` aligns the mask at the top left. What does
# a single new query see then?

# %% tags=["nbval-check-output"]
torch.manual_seed(0)
q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)
top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)
right = F.scaled_dot_product_attention(q, k, v)  # the newest token sees everything
print("is_causal=True gives value 0 alone:", torch.allclose(top_left, v[:, :, :1]))
print("is that right?", torch.allclose(top_left, right))


# %% [markdown]
# It sees only the first token. There is no error; the text just becomes nonsense.

# %% [markdown]
# ### Exercise 2-3 · Who sees whom, while text is generated
# ●●○ · essential · 15 minutes · 5 points
#
# | `visible(seqlen_q, seqlen_k, valid=None)` | type or shape | meaning |
# | --- | --- | --- |
# | `seqlen_q` | integer | the queries: the *last* `seqlen_q` of the `seqlen_k` tokens |
# | `seqlen_k` | integer | all keys: the cache, and the new tokens |
# | `valid` | `(batch, seqlen_k)`, boolean, or `None` | `False` where a key is padding |
# | returns, without `valid` | `(seqlen_q, seqlen_k)`, boolean | `True` where a query may look |
# | returns, with `valid` | `(batch, 1, seqlen_q, seqlen_k)`, boolean | the 1 stands for the heads |
#
# A key is visible if it does not come after the query, and is not padding. This also holds if the query itself is
# padding. With padding on the left, such a query sees nothing: its row is all `False`. SDPA and FlashAttention define
# its output as 0 (a textbook softmax gives 0/0 = NaN), and nothing reads it.
#
# <details><summary>Hint 1: a nudge</summary>
#
# When 3 new tokens follow 8 old ones, at which position is query 0?
#
# <details><summary>Hint 2: the idea</summary>
#
# Query `i` is at position `i + seqlen_k - seqlen_q`. `tril` takes a `diagonal`. Indexing with `None` adds a dimension
# of size 1: which two does `valid` lack, and where?
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# causal = a matrix of True, its lower triangle from diagonal seqlen_k - seqlen_q on
# without valid: return it
# with valid: return causal & valid, with valid's dimensions for heads and queries added
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-3-decoding-mask", "locked": false, "schema_version": 3, "solution": true, "task": false}
def visible(seqlen_q, seqlen_k, valid=None):
    """Boolean mask for the last seqlen_q of seqlen_k tokens: True where a query may look."""
    ### BEGIN SOLUTION
    device = None if valid is None else valid.device
    ones = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    mask = ones.tril(seqlen_k - seqlen_q)
    if valid is not None:
        mask = mask & valid[:, None, None, :]
    return mask
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-3-decoding-mask-positions", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_visible_positions(visible)
### BEGIN HIDDEN TESTS
checks.check_visible_positions(visible, seed=31)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-3-decoding-mask-padding", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_visible_padding(visible)
checks.check_visible_decoding(visible)
### BEGIN HIDDEN TESTS
checks.check_visible_padding(visible, seed=32)
checks.check_visible_decoding(visible, seed=33)
### END HIDDEN TESTS

# %% [markdown]
# ### What the cache is worth, and what it costs
#
# Without a cache, each new token is a prefill of the whole text so far. Guess: how many times as long does a step take
# without it, after a prompt of 256 tokens?

# %%
predicted_cache = None  # your guess, a number

# %%
from labsupport.profiling import measure_time

models.set_attention(model, "flash")
with torch.inference_mode():
    kept = model(ids[:, :256], use_cache=True, logits_to_keep=1).past_key_values
    held = sum(x.nbytes for layer in kept.layers for x in (layer.keys, layer.values))

    def step_with():  # adds one token to the cache
        model(ids[:, 256:257], past_key_values=kept)

    def step_without():
        model(ids[:, :257], use_cache=False, logits_to_keep=1)

    timing = {"device": device, "warmup": 1, "min_repeats": 3, "max_seconds": 0.5}
    times = [measure_time(call, **timing).median for call in (step_with, step_without)]
print(f"a step with the cache: {times[0]:.0f} ms, without: {times[1]:.0f} ms")
worth = times[1] / times[0]
checks.compare_prediction("What the cache is worth", predicted_cache, worth, "times")
config = model.config
per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
print(f"by formula: 2 · layers · kv_heads · head_dim · 4 bytes = {per_token:,} bytes a token")
print(f"in the cache: {held / 256:,.0f} bytes a token")

# %% [markdown]
# The formula contains `kv_heads`, not `heads`. Grouped heads (*grouped-query attention*) make SmolLM2's cache a third as large.
# Long texts need sharing:
#
# ![Size of Llama-3-8B's KV cache against the number of tokens: it outgrows the model, and sharing divides it.](../theory/figures/kv-cache.png)
#
# ### One request, or eight
#
# Two guesses for decoding: how many times as fast as `eager` is FlashAttention? And how many times
# as many tokens per second do 8 requests get together?

# %%
predicted_flash, predicted_eight = None, None  # two numbers


# %%
def decode_step(requests):
    """The time of a step, in ms, and the size of the cache, in MiB, after 64 tokens."""
    batch = ids[:, :64].expand(requests, -1)
    with torch.inference_mode():
        cache = model(batch, use_cache=True, logits_to_keep=1).past_key_values
        size = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        step = measure_time(lambda: model(batch[:, :1], past_key_values=cache), **timing)
    return step.median, size / 2**20


rows = []
for name in ("eager", "flash"):
    if name == "flash":
        models.set_attention(model, name)
    else:
        model.set_attn_implementation(name)
    for requests in (1, 8):
        step, size = decode_step(requests)
        rows.append((name, requests, step, 1000 * requests / step, size))
names = ["attention", "requests", "latency, ms a token", "tokens/s", "cache, MiB"]
serving = pd.DataFrame(rows, columns=names)
one, eight, flash_one, flash_eight = serving["tokens/s"]
checks.compare_prediction("Decoding, flash over eager", predicted_flash, flash_one / one, "times")
bounds = {"possible": (1, 8)}  # beyond them is noise
checks.compare_prediction("8 over 1", predicted_eight, flash_eight / flash_one, "times", **bounds)
serving.round(1)


# %% [markdown]
# With one request, a decode step gains nothing from FlashAttention here. Its scores are one *row* per head, so there
# is no N × N to avoid. With either attention it reads all weights and the whole cache, and a small model waits even
# longer for Python, which starts hundreds of small operations.
#
# Eight requests share one reading of the weights, so their step takes far less than eight times as long.
# *Throughput* (tokens per second, for all) and *latency* (time per token, for one) pull in different directions.
#
# ## 2.8 · A cache of your own
#
# Now you write the cache.
#
# ### Exercise 2-6 · A cache that grows
# ●●○ · useful · 20 minutes · 6 points
#
# Two buffers, `self.k` and `self.v`, `(batch, kv_heads, room, head_dim)`, hold a layer's keys and values. The first
# `self.length` of the `room` tokens are filled. `append(k, v)` takes new tokens, `(batch, kv_heads, new, head_dim)`,
# and returns all keys and values so far, `(batch, kv_heads, length, head_dim)`. If the room is too small, make two new
# buffers and copy the old tokens: twice the old room, or as much as all tokens need, if that is more.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Where in the buffer does the first new token belong? It is 0 only for the first call.
#
# <details><summary>Hint 2: the idea</summary>
#
# The new tokens go to `self.k[:, :, self.length : end]`, with `end = self.length + k.shape[2]`. If `end` is larger than
# the room, enlarge both buffers first. `F.pad(x, (0, 0, 0, more))` adds `more` rows of zeros at the end of the second
# last dimension.
#
# <details><summary>Hint 3: an outline</summary>
#
# 1. First call: start with empty buffers, `k[:, :, :0]` and `v[:, :, :0]`.
# 2. Compute `end`, and compare it with the room, `self.k.shape[2]`. Enlarge to `max(end, 2 * room)`.
# 3. Write `k` and `v` after the old tokens, and set `self.length = end`.
# 4. Return the filled part of both, as slices: they copy nothing.
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-6-cache", "locked": false, "schema_version": 3, "solution": true, "task": false}
class KVCache:
    """Keys and values of one layer, in buffers that grow."""

    def __init__(self):
        self.k = self.v = None  # (batch, kv_heads, room, head_dim)
        self.length = 0  # how many tokens are in them

    def append(self, k, v):
        """Add (batch, kv_heads, new, head_dim); return all keys and all values so far."""
        ### BEGIN SOLUTION
        if self.k is None:
            self.k, self.v = k[:, :, :0], v[:, :, :0]
        end, room = self.length + k.shape[2], self.k.shape[2]
        if end > room:
            more = max(end, 2 * room) - room
            self.k, self.v = (F.pad(x, (0, 0, 0, more)) for x in (self.k, self.v))
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]
        ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-6-cache-values", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
checks.check_cache_values(KVCache)
### BEGIN HIDDEN TESTS
checks.check_cache_values(KVCache, seed=31)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-6-cache-growth", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_cache_growth(KVCache)
### BEGIN HIDDEN TESTS
checks.check_cache_growth(KVCache, seed=32)
### END HIDDEN TESTS

# %% [markdown]
# Each of SmolLM2's layers now gets one of your caches. Is the text the same as with Transformers' cache?

# %%
models.set_attention(model, "flash")
own_cache = checks.solution_or_reference(KVCache, "dynamic", checks.check_cache_values)
answers = [
    models.generate(model, tokenizer, prompts[0], max_new_tokens=16, cache=cache).text
    for cache in (own_cache, "dynamic")
]
print(answers[0])
print("the same text as with Transformers' cache:", answers[0] == answers[1])

# %% [markdown]
# ### Decoding in parts
#
# A kernel starts one *program* for each block of queries of each head, and each *multiprocessor* of a GPU computes one
# or two programs at a time. An H200 has 132. A decode step with 32 heads has 32 programs: most of the GPU idles. So let
# many programs read a part of the keys each, and merge their results:

# %%
steps = load_run("decode-h200").query("batch == 1 and implementation in ['flash_triton', 'decode']")
share = steps.pivot(index="keys", columns="implementation", values="of_copy").round(2)
more = share.decode.iloc[-1] / share.flash_triton.iloc[-1]
chart = plotting.plot_by_window(
    share.reset_index().rename(columns={"keys": "window"}),
    {"flash_triton": "one program for each head", "decode": "keys in parts"},
    title=f"With {share.index[-1]:,} keys, reading them in parts is {more:.0f} times as fast",
    ylabel="share of a copy's bandwidth",
    small_print="recorded: NVIDIA H200, one query, 32 heads, one request (decode-h200)",
)
chart.axes[0].set_xlabel("keys")
chart

# %% [markdown]
# (The share is 1 at a copy's bytes per second. Reading alone can be faster, so 1.03 is no error.) The merge is exact.
# You write it in notebook 3, where the parts come from several devices, and a split decode in
# [further/serving](further/serving.ipynb).

# %% [markdown]
# ## 2.9 · Find the fault
#
# This model with ten layers runs in float16 and has its own attention function. Its logits are NaN.

# %%
from transformers import LlamaConfig, LlamaForCausalLM


def plain_attention(q, k, v):
    """Causal attention; (batch, heads, seqlen, head_dim)."""
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


heard = {}  # each layer's q, k, v


def in_layers(module, query, key, value, attention_mask, **kwargs):
    heard[module.layer_idx] = query, key, value
    return plain_attention(query, key, value).transpose(1, 2), None


torch.manual_seed(0)
sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 10}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
ten_layers = LlamaForCausalLM(LlamaConfig(**sizes)).half().to(device).eval()
sharpness = 900 * torch.rand(10, generator=torch.Generator().manual_seed(3009)) ** 2
with torch.no_grad():  # some layers attend more sharply, as after training
    for layer, factor in zip(ten_layers.model.layers, sharpness, strict=True):
        layer.self_attn.q_proj.weight *= factor
        layer.self_attn.k_proj.weight *= factor
ten_layers.set_attn_implementation(models.register_attention("plain", in_layers))
words = (torch.arange(24, device=device) * 37 % 100)[None]
with torch.inference_mode():
    print("NaN in the logits:", ten_layers(words).logits.isnan().any().item())

# %% [markdown]
# A NaN spreads: causal attention carries it to later tokens of the next layers. `PrecisionTracker` names the first
# module with a NaN:

# %%
from labsupport.precision import PrecisionTracker

with torch.inference_mode(), PrecisionTracker(ten_layers) as tracker:
    ten_layers(words)
print(tracker.report())
frame = tracker.to_dataframe()  # a row for each call of a module: name, dtypes, largest, nan, ...
bad = frame[(frame.nan > 0) & (frame.kind != "block")].sort_values("order")
first = bad.name.iloc[0].removeprefix("model.")
title = f"NaN begins at {first}, though finite outputs reach only {frame.largest.max():.0f}"
plotting.plot_dtype_flow(frame, title=title)


# %% [markdown]
# ### Exercise 2-8 · NaN in one of ten layers
# ●●○ · useful · 25 minutes · 4 points
#
# Write two functions. You can add cells: `frame` has the ranges of all modules, and `heard[i]` is q, k, v of layer `i`.
#
# | function | returns |
# | --- | --- |
# | `cause()` | the layer in which the first NaN appears, counted from 0, and the letter of the cause, such as `(0, "A")` |
# | `repaired(q, k, v)` | what `plain_attention` should return, in float16: copy it, and change one line. (You may cast q and k to float32 on the way.) |
#
# | | possible causes |
# | --- | --- |
# | A | weights of that layer hold NaN or infinity: the file was damaged |
# | B | the residual stream (the sum that passes from layer to layer) has outgrown float16 there |
# | C | a query sees no key, and its softmax is 0 / 0 |
# | D | the exponentials of the softmax leave the range: $e^{12}$ is beyond 65,504 |
# | E | the products of queries and keys leave the range before they are divided |
# | F | the scores, divided by $\sqrt d$, do not fit into float16: only a wider dtype can help |
#
# <details><summary>Hint 1: a nudge</summary>
#
# The report names two modules between which the NaN appears. What is computed there, and are its inputs finite?
#
# <details><summary>Hint 2: the idea</summary>
#
# Take that layer's q and k from `heard`, and compute `plain_attention` line by line, in float16 and in float32. What is
# the largest magnitude after each step, and where does float16 end?
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# frame[frame.name.str.contains("layers.N.")][["name", "largest", "nan"]], with N the layer
# q and k in float32: the largest of the products, and the largest of the scores
# repaired: the same operations in another order; the result is the same number in exact arithmetic
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-8-cause", "locked": false, "schema_version": 3, "solution": true, "task": false}
def cause():
    """The layer of the first NaN, and the letter of the cause."""
    ### BEGIN SOLUTION
    return 7, "E"
    ### END SOLUTION


# %% nbgrader={"grade": false, "grade_id": "ex-2-8-fault", "locked": false, "schema_version": 3, "solution": true, "task": false}
def repaired(q, k, v):
    """What `plain_attention` should return."""
    ### BEGIN SOLUTION
    seen = torch.ones(q.shape[-2], k.shape[-2], device=q.device).tril() > 0
    scaled = q / q.shape[-1] ** 0.5  # before the product, not after it
    return (scaled @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-8-cause-letter", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_nan_cause(cause)

# %% nbgrader={"grade": true, "grade_id": "ex-2-8-fault-output", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_careful_attention(repaired)
### BEGIN HIDDEN TESTS
checks.check_careful_attention(repaired, seed=81)
### END HIDDEN TESTS

# %% [markdown]
# The model with your repair:

# %%
own_repair = checks.solution_or_reference(
    repaired,
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    checks.check_careful_attention,
)


def in_layers_repaired(module, query, key, value, attention_mask, **kwargs):
    return own_repair(query, key, value).transpose(1, 2), None


ten_layers.set_attn_implementation(models.register_attention("repaired", in_layers_repaired))
with torch.inference_mode():
    print("NaN in the logits:", ten_layers(words).logits.isnan().any().item())

# %% [markdown]
# The NaN is gone. But at the largest score, 33,803, float16 has steps of 32, so scores close to each other become
# equal. FlashAttention's kernels store the tile of scores in float32, and meet neither problem. The [field
# guide](../theory/10-field-guide.md#nan) lists more causes of NaN.
#
# ## 2.10 · Which dtype, where
#
# The fault was one of range. The best practice, one row for each component:
#
# | component | recommended | must dtypes match? | why |
# | --- | --- | --- | --- |
# | q, k, v | bfloat16; float32 on a CPU | all three | kernels take one dtype; float16 only if the range allows it |
# | running maximum and sum | float32 | inside the kernel | a sum in bfloat16 (8 significant bits) stops growing |
# | attention and MLP weights | bfloat16; in training also masters, float32 copies that the optimizer updates | a module's input follows its weights | small updates are lost |
# | norms | statistics in float32 | no: returns its input's dtype | squares overflow float16 from 256 on |
# | embedding | bfloat16 with masters, or float32 | a shared output layer follows it | small updates are lost |
# | loss | float32, from the logits on | no | steps are coarse, and gradients become 0 |
# | gradients | scale the loss for float16 | no | small ones become 0 |
#
# [Chapter 6](../theory/06-precision.md#mixed-precision-training) explains the rows, and
# [further/precision](further/precision.ipynb) shows each in an experiment. A `FlashAttentionConfig` is such a table for
# one model, and `apply_precision_policy` applies it. The default, on a CPU too: all is bfloat16 but norm statistics,
# loss and optimizer.

# %%
import copy

from labsupport.precision import FlashAttentionConfig, apply_precision_policy

models.set_attention(model, "flash")
half = copy.deepcopy(model)
apply_precision_policy(half, FlashAttentionConfig())
for name, one in (("float32", model), ("the policy", half)):
    nats = models.negative_log_likelihood(one, ids[:, :256])
    weights = sum(p.nbytes for p in one.parameters()) / 2**20
    print(f"{name}: NLL {nats:.4f}, weights {weights:.0f} MiB")
FlashAttentionConfig()

# %% [markdown]
# Half the bytes, and the model predicts as well as before, although every layer now rounds to two or three digits: here, the
# errors average out. An overflow does not.
#
# ## What you measured
#
# - Exchanging a model's attention changes its logits and gradients by rounding only.
# - `use_flash_attn=True` has no effect; only a record of what ran proves something.
# - Long texts gain time and memory, in reading and training. Amdahl's law says how much.
# - In decoding, queries are the *last* tokens: align the mask at the bottom right.
# - With short texts a decode step waits for weights and Python: batches help it, FlashAttention does not. With very
#   long texts it waits for the cache: shared heads and keys in parts help.
# - When you choose a dtype, range comes before precision.
#
# ### Three questions
#
# <details><summary>1. A colleague replaced attention by FlashAttention and sees no gain in tokens per second. The model answers short questions, one at a time. What do you say?</summary>
#
# The time goes to decode steps, which wait for the weights, and at batch 1 for Python. A larger batch or a smaller
# dtype would help. For long prompts the *time to the first token* will fall.
# </details>
#
# <details><summary>2. Why does a registered attention function also need a mask function?</summary>
#
# Transformers calls it to make the mask of each batch. Without one, layers attend to padding, without an error.
# </details>
#
# <details><summary>3. A cache has room for 1,024 tokens; 600 of them are filled, and 4 new tokens come. Which keys may the first of the four see? And what would a bottom-right mask over all 1,024 places say?</summary>
#
# It is at position 600, so it sees keys 0 to 600. Aligned with the end of the buffer, the mask would let it see keys up
# to 1,020, in places that are still empty. Align it with the end of the *filled* keys, 604.
# </details>
#
# ### Read on
#
# - [Chapter 9](../theory/09-inference.md): both phases on the roofline, paging, speculation.
# - [Serving many requests](further/serving.ipynb), with more of exercise 2-6; [which dtype on which
#   device](further/precision.ipynb), with exercise 2-5; [masks and scores of your own](further/masks.ipynb), with
#   exercise 2-7; [training in low precision](further/low-precision-training.ipynb), with exercise 2-9.
# - J. Ainslie et al.: *GQA* (2023), arXiv:2305.13245. Why keys and values are shared.

# %% [markdown]
# ### How far you are
#
# The checks run once more, on your definitions. (`labsupport progress`, in a terminal, reads the saved notebooks.)

# %%
from labsupport.course.progress import show_progress

show_progress("02", globals())
