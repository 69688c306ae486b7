# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2 · FlashAttention inside real models: reading, training, generating
#
# ![Time of SmolLM2-135M to read a text on two CPU cores against its length: with FlashAttention the whole model is several times as fast at 8,192 tokens, and hardly faster at 512.](../theory/figures/model-gain.png)
#
# With another attention function and the same weights, a model gives the same answers. Here you exchange that function,
# and learn when it pays off.
#
# **After this notebook you can**
#
# - exchange the attention of a Transformers model, and prove that nothing else changed;
# - say which kernel ran in which layer;
# - measure a *whole* model's gain in time, memory and tokens per second, in training and inference;
# - place the causal mask when keys outnumber queries, as in every step of generation;
# - predict the gain from attention's share, and name the cases without one;
# - choose dtypes for inference, and check them.
#
# **Time** about 185 minutes; the exercises take 127 of them. Sections marked *further* are optional; the core, 2.1 to
# 2.4, 2.6, 2.7, 2.9 and 2.13, fits an afternoon (135 minutes). **You need** notebook 1, some experience with Hugging
# Face Transformers, and a laptop: the model has 135 million parameters.
#
# **Read alongside**: theory chapter [9, Inference](../theory/09-inference.md), and the [glossary](../theory/glossary.md).
#
# **How to work.** As in notebook 1: run the cells in order, write your guesses down, and let the checks tell you which
# mistake you made.

# %%
import pandas as pd
import torch
import torch.nn.functional as F
import transformers

from labsupport import checks, models, plotting
from labsupport.attention import flash_attention
from labsupport.profiling import environment_card

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
environment_card()

# %%
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
lengths = [512, 1024, 2048, 4096] if device.type == "cuda" else [256, 512, 1024]

# %% [markdown]
# ## 2.1 · A real model and a real text
# *Core · 4 minutes*
#
# SmolLM2-135M-Instruct is a small Llama: 30 layers, 9 query heads that share 3 key/value heads, head_dim 64, up to
# 8,192 tokens. `make lab` has fetched it. Random weights would do to measure speed, but only a trained model gives
# *answers* to compare.

# %%
smollm2 = models.load_model("smollm2", attention=None, dtype=torch.float32, device=device)
model, tokenizer = smollm2.model, smollm2.tokenizer
print(smollm2.source)

# %% [markdown]
# *Greedy* decoding takes the likeliest token at each step, so it always gives the same answer:

# %%
question = "What is the capital of France?"
answer = models.generate(model, tokenizer, question, chat=True, max_new_tokens=16)
print(answer.text)

# %% [markdown]
# Change `question` to ask something else.
#
# Next, the model reads a file of Python's standard library. The *negative log-likelihood*, NLL, measures how well it
# predicts the text: the mean of $-\ln p(\text{next token})$, in nats a token. Guessing blindly among 49,152 tokens
# costs $\ln 49{,}152 = 10.8$.

# %%
ids = models.tokens_of(tokenizer, models.source_text("argparse"), lengths[-1]).to(device)
print(tokenizer.decode(ids[0, 600:660]))
print("...")
nll = models.negative_log_likelihood(model, ids[:, :512])
print(f"{ids.shape[1]:,} tokens; NLL of the first 512: {nll:.2f} nats a token")

# %% [markdown]
# ## 2.2 · Two layouts
# *Core · 13 minutes*
#
# A projection gives each token one long vector, in which the heads lie side by side. Two layouts are common after that:
#
# | layout | shape | who uses it |
# | --- | --- | --- |
# | flash-attn's | `(batch, seqlen, heads, head_dim)` | flash-attn, this lab |
# | SDPA's | `(batch, heads, seqlen, head_dim)` | PyTorch, Transformers |
#
# ![A token's vector, in which the heads lie side by side, read in two orders: token by token, or head by head.](../theory/figures/layouts.png)
#
# Both hold the same numbers. The conversion moves nothing in memory: a *view* with other strides is enough. But `reshape`
# gives the right shape and the wrong data: it mixes up heads and tokens, without an error.

# %% tags=["nbval-check-output"]
x = torch.arange(2 * 3 * 2).view(1, 2, 3, 2)  # (batch, heads, seqlen, head_dim)
print("head 0:", x[0, 0].tolist(), "  head 1:", x[0, 1].tolist())
print("token 0, transposed:", x.transpose(1, 2)[0, 0].tolist())
print("token 0, reshaped:  ", x.reshape(1, 3, 2, 2)[0, 0].tolist(), "<- two tokens of head 0")


# %% [markdown]
# The shapes are the same, so no kernel can notice.

# %% [markdown]
# ### Exercise 2-1 · From a model's tensors to flash-attn's layout
# ●○○ · 10 minutes · 4 points
#
# FlashAttention's kernels read strided tensors: they need the dimensions in the right order, wherever the numbers lie.
# So copy nothing: every result is a *view* of the argument's memory.
#
# | function | takes | returns |
# | --- | --- | --- |
# | `split_heads(x, heads)` | `x`: `(batch, seqlen, heads * head_dim)`, the output of a projection | `(batch, seqlen, heads, head_dim)` |
# | `to_flash_layout(x)` | `x`: `(batch, heads, seqlen, head_dim)`, as Transformers passes it to attention | `(batch, seqlen, heads, head_dim)` |
# | `split_qkv(qkv, heads, kv_heads)` | `qkv`: `(batch, seqlen, (heads + 2 * kv_heads) * head_dim)`, one projection for all: first all heads of q, then all of k, then all of v | `q`: `(batch, seqlen, heads, head_dim)`; `k` and `v`: `(batch, seqlen, kv_heads, head_dim)` |
#
# In a projection's output, one head's numbers are next to each other, head after head.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which dimension must be cut, and into what? Which two must change places? See the picture above.
#
# <details><summary>Hint 2: the idea</summary>
#
# `view` and `unflatten` keep the numbers' order in memory, and only cut them differently; `transpose` swaps two
# dimensions. Both can give the same shape, so the shape does not tell you which is right. `split` takes a list of
# widths, which may differ.
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
# *Core · 32 minutes*
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
# A configuration stores every name that you give it, even one that nothing reads. There is no error, and no effect.
#
# What works is `model.set_attn_implementation(name)`. It chooses from a table of attention functions, to which you can
# add your own. Each layer calls the chosen function with queries, keys and values in SDPA's layout, and expects the
# output in flash-attn's.
#
# ![The layers of a model call one function of a table, which the configuration names: tensors go in as (batch, heads, seqlen, head_dim) and come back as (batch, seqlen, heads, head_dim).](../theory/figures/attention-table.png)

# %% [markdown]
# ### Exercise 2-2 · Your own attention in a Transformers model
# ●●○ · 25 minutes · 5 points
#
# Write an attention function for Transformers that calls `flash_attention`. Its arguments:
#
# | argument | | |
# | --- | --- | --- |
# | `module` | the model's attention layer | `module.is_causal` says whether the future is hidden |
# | `query` | `(batch, heads, seqlen_q, head_dim)` | in decoding, the *last* `seqlen_q` tokens |
# | `key`, `value` | `(batch, kv_heads, seqlen_k, head_dim)` | `kv_heads` may be smaller than `heads` |
# | `attention_mask` | a tensor, or `None` | without padding it is `None` here |
# | `scaling` | a number, or `None` | factor on the scores; `None` means $1/\sqrt d$ |
# | `dropout` | a number | 0 in inference |
# | `is_causal`, in `kwargs` | `True`, `False`, `None`, or absent | overrules `module.is_causal`, unless `None` or absent |
#
# Return the output, `(batch, seqlen_q, heads, head_dim)`, and `None` (in the place of the attention weights, which
# FlashAttention never stores).
#
# `flash_attention(q, k, v, causal=..., softmax_scale=...)` takes flash-attn's layout and grouped heads, and aligns a
# causal mask at the bottom right. It takes neither masks nor dropout, so raise a `ValueError` when `attention_mask` is
# not `None`, or `dropout` is not 0.
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


# %% nbgrader={"grade": true, "grade_id": "ex-2-2-own-attention-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_registered_values(lab_attention)
### BEGIN HIDDEN TESTS
checks.check_registered_values(lab_attention, seed=21)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-2-own-attention-models", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_registered_models(lab_attention)
### BEGIN HIDDEN TESTS
checks.check_registered_models(lab_attention, seed=22)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-2-own-attention-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_registered_memory(lab_attention)

# %% nbgrader={"grade": true, "grade_id": "ex-2-2-own-attention-refusals", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_registered_refusals(lab_attention)
### BEGIN HIDDEN TESTS
checks.check_registered_refusals(lab_attention, seed=24)
### END HIDDEN TESTS

# %% [markdown]
# Compare it in SmolLM2 with Transformers' own textbook attention, `eager`. The logits (the scores of the 49,152
# possible next tokens) lie between about -10 and 30. Guess: what is the largest difference between the two sets of
# logits?

# %%
predicted_difference = None  # your guess, a number

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
    nll = F.cross_entropy(logits[name][0, :-1], ids[0, 1:256])
    print(f"{name:6} NLL {nll:.6f}")
difference = (logits["mine"] - logits["eager"]).abs().max().item()
checks.compare_prediction("Largest difference of a logit", predicted_difference, difference)

# %% [markdown]
# They agree up to float32 rounding, which 30 layers do not amplify.
#
# This cell puts *your* FlashAttention, the loops over tiles of exercise 1-4 in your saved notebook 1, into all 30 layers:

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
with torch.inference_mode():
    nll = F.cross_entropy(model(ids[:, :256]).logits[0, :-1], ids[0, 1:256])
print(f"loops  NLL {nll:.6f}")
print(models.generate(model, tokenizer, "The capital of France is", max_new_tokens=6).texts[0])

# %% [markdown]
# With a Python loop for attention, the model still says the same. The loop is slow because each line is a separate
# operation, and right because the mathematics is.
#
# > **A common error.** A name with "flash" in it, such as `"my_flash"`: Transformers takes that for one of its own
# > kernels and looks for it on its hub. `models.register_attention` refuses such names, and says why.
#
# ### Padding
#
# In a batch of prompts, *padding* fills the short ones up. A function that ignores the mask lets real tokens look at
# it, so yours refuses masks.
#
# ![Two prompts of different length in one batch, the short one filled up on its left: without a mask its tokens look at the padding, with the padding cut out they see only the prompt.](../theory/figures/padding.png)
#
# In Transformers this mistake is easy to make: besides the attention function you have to register, in a second table,
# a function that *makes masks*. Without one there is no mask, and no error either. What will the model say to the short
# prompt, "The capital of Italy is", in a batch with a longer one?

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
# `models.set_attention(model, backend)` fills both tables. It knows all backends of notebook 1, and `"flash"` for any
# that never stores the N × N scores. It cuts padding out, so that nothing is computed for it. It refuses what a backend
# cannot do, with reasons, and records what really ran:

# %%
models.set_attention(model, "flash")
alone_and_padded()
print(models.attention_used(model))

# %% [markdown]
# The lab's log (`logging.getLogger("labsupport.models")`) says the same, one line for each layer ("Using FlashAttention
# for layer 3 (sdpa_flash)"). The environment variable `LABSUPPORT_ATTENTION` makes the choice without changing the
# program.

# %% [markdown]
# ## 2.4 · Reading a long text
# *Core · 5 minutes*
#
# In notebook 1, attention *alone* became several times as fast. Now the whole model reads a text, with `eager` and with
# FlashAttention. Guess: how many times as fast is the *whole model*, at the longest length?

# %%
predicted_gain = None  # your guess, a number, before you run the next cell

# %%
from labsupport.profiling import speedup

columns = {
    "backend": "attention",
    "seqlen": "tokens",
    "median_ms": "time, ms",
    "tokens_per_s": "tokens/s",
    "speedup": "speed-up",
    "peak_memory_bytes": "extra memory, MiB",
    "loss": "NLL",
}


def shown(table):
    table = table.assign(peak_memory_bytes=table.peak_memory_bytes / 2**20)
    digits = {"median_ms": 1, "tokens_per_s": 0, "speedup": 2, "peak_memory_bytes": 0, "loss": 5}
    return table[[name for name in columns if name in table]].round(digits).rename(columns=columns)


options = {"attentions": ["eager", "flash"], "lengths": lengths, "max_seconds": 0.3}
reading = models.measure_model(model, ids, **options)
reading = speedup(reading, over="eager")
longest = reading[reading.seqlen == lengths[-1]].set_index("backend")
gain = longest.speedup["flash"]
checks.compare_prediction("Gain of the whole model", predicted_gain, gain, "times")
shown(reading)

# %%
saving = longest.peak_memory_bytes["eager"] / longest.peak_memory_bytes["flash"]
plotting.plot_memory(
    reading,
    title=f"With eager the model needs {saving:.0f} times the extra memory for {lengths[-1]:,} tokens",
    references=[plotting.Reference("S and P of one layer", lambda n: 2 * 9 * n**2 * 4 / 2**20)],
)

# %% [markdown]
# The gain grows with the length, and so does the memory of `eager`. In a short text the logits of a chunk of tokens
# are the largest part; in a long one $S$ and $P$ of *one* layer are (a forward pass has only one layer's in memory at
# a time). FlashAttention has no such term. The table's last column is the control: the losses agree to the last digit
# shown.
#
# The whole model should gain less than attention alone did in notebook 1; section 2.9 says why.

# %% [markdown]
# ## 2.5 · Training
# *Further (optional) · 6 minutes*
#
# Training must store what the backward pass needs, for all layers. The textbook stores its N × N weights $P$ in each.
# The model is a GPT-2 with 4 layers that reads bytes (so that a vocabulary of 50,000 words does not hide attention).
# Its weights are random, which does not change time or memory.

# %%
sizes = {"n_layer": 4, "n_head": 8, "n_embd": 512, "vocab_size": 256, "n_positions": 4096}
try:
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes)).to(device).train()
    models.set_attention(gpt2, "flash")
    gpt2(torch.zeros(1, 8, dtype=torch.long, device=device))
except RuntimeError as error:
    print(type(error).__name__, "-", error)

# %% [markdown]
# By default, GPT-2 drops a tenth of the attention weights at random during training. The kernels here cannot do that, so
# the lab raises an error instead of ignoring it. Today's models train without it.

# %%
no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout)).to(device).train()
text = "".join(models.python_topics().values()).encode()
text_bytes = torch.tensor(list(text[: lengths[-1]]), device=device)[None]


def gradients(name):
    models.set_attention(gpt2, name)
    gpt2.zero_grad()
    gpt2(text_bytes[:, :256], labels=text_bytes[:, :256]).loss.backward()
    return torch.cat([p.grad.flatten() for p in gpt2.parameters()])


reference = gradients("standard")
error = (gradients("flash") - reference).norm() / reference.norm()
print(f"relative difference of all {reference.numel():,} gradients: {error:.0e}")

# %% [markdown]
# The gradients agree, so training does, too. Guess: how many times the memory does one step take with
# `eager`, at the longest length?

# %%
predicted_saving = None  # your guess, a number

# %%
both = {"attentions": ["eager", "flash"], "lengths": [lengths[0], lengths[-1]]}
training = pd.concat(
    models.measure_model(gpt2, text_bytes, direction=direction, max_seconds=0.2, **both)
    for direction in ("forward", "forward+backward")
)
training = speedup(training, over="eager")
step = training[(training.seqlen == lengths[-1]) & (training.direction == "forward+backward")]
step = step.set_index("backend")
saving = step.peak_memory_bytes["eager"] / step.peak_memory_bytes["flash"]
checks.compare_prediction("Memory of a step, eager over flash", predicted_saving, saving, "times")
shown(training.assign(backend=training.backend + ", " + training.direction)).drop(columns="NLL")

# %% [markdown]
# With `eager`, $P$ of *all* layers waits for the backward pass: one square for each layer. FlashAttention stores one
# number a row, and recomputes the rest. For short texts there is hardly any gain, since recomputing $S$ costs
# arithmetic, too. Section 2.12 has a larger model and longer texts.

# %% [markdown]
# ## 2.6 · Who may look where: GPT and BERT
# *Core · 4 minutes*
#
# A GPT writes from left to right, with a *causal* mask. In a BERT each token sees all others, in both directions. For
# $N$ tokens the causal mask leaves $N(N+1)/2$ of $N^2$ pairs. An
# implementation that works tile by tile skips the
# hidden tiles; the textbook computes all pairs, and then hides half of them.
#
# ![Tiles of a causal mask: those above the diagonal are skipped, those on it need a mask; with fewer queries than keys; and with a window.](../theory/figures/tiles-visited.png)
#
# Guess: how long does FlashAttention take with a causal mask, relative to without one? And the textbook?

# %%
predicted_flash, predicted_textbook = None, None  # two fractions, such as 0.8

# %%
from labsupport.profiling import grid, run_grid

shape = {"heads": 8, "head_dim": 64, "causal": [False, True]}
fused = "sdpa_flash" if device.type == "cpu" else "sdpa_efficient"  # takes float32 on a GPU too
cases = grid(["standard", fused], [1024], **shape)
masks = run_grid(cases, device=device, measure_error=False, max_seconds=0.4)
masks["GFLOPs needed"] = masks.tflops * masks.median_ms
masks["time, ms"] = masks.median_ms
times = masks.pivot(index="backend", columns="causal", values="time, ms")
for name, guess in ((fused, predicted_flash), ("standard", predicted_textbook)):
    ratio = times[True][name] / times[False][name]
    checks.compare_prediction(f"{name}, causal over all pairs", guess, ratio)
masks.pivot(index="backend", columns="causal", values=["GFLOPs needed", "time, ms"]).round(1)

# %% [markdown]
# A causal call needs half of the GFLOPs. On a quiet machine FlashAttention's time falls, but not to a half: the tiles
# on the diagonal are computed in full, and short rows use the cores less well. (If its ratio is near or above 1, that
# is noise, or a kernel that skips little at this length.) The textbook computes everything, and spends another pass on
# hiding.
#
# In a model, the layer says whether attention is causal (`module.is_causal`). Here is a BERT with random weights on a
# batch with padding, with both implementations:

# %%
from transformers import BertConfig, BertModel

bert_sizes = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
bert = BertModel(BertConfig(vocab_size=100, **bert_sizes)).to(device).eval()
words = torch.randint(100, (2, 10), device=device)
mask = torch.ones_like(words)
mask[1, 6:] = 0  # the second text has 6 tokens
states = {}
for name in ("standard", "flash"):
    models.set_attention(bert, name)
    with torch.inference_mode():
        states[name] = bert(words, attention_mask=mask).last_hidden_state[mask.bool()]
print(
    f"largest difference at real tokens: {(states['standard'] - states['flash']).abs().max():.0e}"
)

# %% [markdown]
# ## 2.7 · Generating text: two phases, and a cache
# *Core · 14 minutes*
#
# To write the next token, a model needs the keys and values of all earlier tokens. These never change, because a causal
# mask keeps the past from looking ahead. The model stores them in the *KV cache*, and generation has two phases:
#
# | phase | queries | keys | |
# | --- | --- | --- | --- |
# | *prefill* | the whole prompt, $N$ | $N$ | once |
# | *decode* | 1, the newest token | all so far | once for each new token |
#
# ![Prefill: all queries meet all keys, a triangle, and the keys and values go into the cache. Decode: one query meets the whole cache, one row, and adds one key and value.](../theory/figures/prefill-decode.png)
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
# It sees only the first token of the text. There is no error; the text just becomes nonsense.

# %% [markdown]
# ### Exercise 2-3 · Who sees whom, while text is generated
# ●●○ · 10 minutes · 3 points
#
# | `visible(seqlen_q, seqlen_k, valid=None)` | | |
# | --- | --- | --- |
# | `seqlen_q` | integer | the queries: the *last* `seqlen_q` of the `seqlen_k` tokens |
# | `seqlen_k` | integer | all keys: the cache, and the new tokens |
# | `valid` | `(batch, seqlen_k)`, boolean, or `None` | `False` where a key is padding |
# | returns, without `valid` | `(seqlen_q, seqlen_k)`, boolean | `True` where a query may look |
# | returns, with `valid` | `(batch, 1, seqlen_q, seqlen_k)`, boolean | the 1 stands for the heads |
#
# A key is visible if it does not come after the query, and is not padding. This also holds if the query itself is
# padding. With padding on the left, such a query sees nothing: its row is all `False`. SDPA and FlashAttention define its output as
# 0, and nothing reads it.
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
# with valid: return causal and valid, with valid's dimensions for heads and queries added
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


# %% nbgrader={"grade": true, "grade_id": "ex-2-3-decoding-mask-positions", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_visible_positions(visible)
### BEGIN HIDDEN TESTS
checks.check_visible_positions(visible, seed=31)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-3-decoding-mask-padding", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_visible_padding(visible)
### BEGIN HIDDEN TESTS
checks.check_visible_padding(visible, seed=32)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-3-decoding-mask-steps", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_visible_decoding(visible)
### BEGIN HIDDEN TESTS
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

    quick = {"device": device, "warmup": 1, "min_repeats": 3, "max_seconds": 0.5}
    times = [measure_time(call, **quick).median for call in (step_with, step_without)]
print(f"a step with the cache: {times[0]:.0f} ms, without: {times[1]:.0f} ms")
worth = times[1] / times[0]
checks.compare_prediction("What the cache is worth", predicted_cache, worth, "times")

# %%
config = model.config
per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
print(f"by formula: 2 · layers · kv_heads · head_dim · 4 bytes = {per_token:,} bytes a token")
print(f"in the cache: {held / 256:,.0f} bytes a token")

# %% [markdown]
# The formula contains `kv_heads`, not `heads`. SmolLM2's nine query heads share three key/value heads (*grouped-query
# attention*), so its cache is a third as large as with nine. Long texts need it:
#
# ![Size of the KV cache of Llama-3-8B against the number of tokens, for 32, 8 and 1 heads of keys and values: it outgrows the model, and sharing divides it.](../theory/figures/kv-cache.png)
#
# ### Both kinds of attention, one prompt
#
# The next cell times prefill and decode separately. Guess: how many times as fast is *decoding* with FlashAttention?

# %%
predicted_decode = None  # your guess, a number

# %%
prompt = tokenizer.decode(ids[0, :128])
compared = models.compare_attention(model, tokenizer, prompt, max_new_tokens=6, repeats=2)
rates = compared.table.set_index("backend")
ratio = rates.decode_tokens_per_s["flash"] / rates.decode_tokens_per_s["standard"]
checks.compare_prediction("Decoding, flash over standard", predicted_decode, ratio, "times")
print(compared)

# %% [markdown]
# Prefill gains a little at this length, a decode step almost nothing. Its scores are one *row* per head, so there is no
# N × N to avoid. With either attention it reads all weights and the whole cache once. By its FLOPs a byte it is
# *memory-bound*; in fact, at batch 1, starting hundreds of small operations takes most of the time on most machines
# (section 2.12).
#
# The report also compares the logits. They differ by rounding, within a measured bound: the distance of each from the
# same model in float64. Where two tokens are almost equally likely, rounding may pick the other one, and the texts differ from
# there on. As long as the logits are within the bound, this is not an error.

# %% [markdown]
# ## 2.8 · One request, or many
# *Further (optional) · 5 minutes*
#
# A decode step reads every weight for one token. It could use them for other requests' tokens in the same pass. Guess:
# how many times as many tokens per second does the model write for 16 requests together?

# %%
predicted_throughput = None  # your guess, a number

# %%
rows = []
with torch.inference_mode():
    for requests in (1, 4, 16):
        batch = ids[:, :16].expand(requests, -1)
        cache = model(batch, use_cache=True, logits_to_keep=1).past_key_values
        step = measure_time(lambda b=batch, c=cache: model(b[:, :1], past_key_values=c), **quick)
        rows.append((requests, step.median, 1000 * requests / step.median))
serving = pd.DataFrame(rows, columns=["requests", "latency, ms a token", "throughput, tokens/s"])
many = serving.iloc[-1, 2] / serving.iloc[0, 2]
checks.compare_prediction("Throughput of 16 over 1", predicted_throughput, many, "times")
if not 1 < many < 16:
    print("Noise: something else used this machine meanwhile. Run the cell again.")
serving.round(1)

# %% [markdown]
# A step for 16 requests takes longer than one for a single request, but should take far less than 16 times as long,
# since all share one reading of the weights. So *throughput* (tokens per second, for all) and *latency* (time per
# token, for one) pull in different directions, and a benchmark without the batch size says little. FlashAttention plays
# no part in this.
#
# ![Left, prefill and decode under the roof of an H200; right, tokens per second at most against the batch: batching lifts the linear layers, but not attention.](../theory/figures/inference-bounds.png)

# %% [markdown]
# ## 2.9 · What does not get faster, and why
# *Core · 23 minutes*
#
# Three cases gain little: short texts, decode steps, and everything in a model that is not attention. The third follows a law.

# %%
predicted_half = (
    None  # SmolLM2 reads a text: from how many tokens on is attention half of the FLOPs?
)


# %% [markdown]
# ### Exercise 2-4 · How much faster does the whole model get?
# ●○○ · 20 minutes · 3 points
#
# `amdahl(share, speedup)` returns how many times as fast the whole becomes, when a part that takes the fraction `share`
# of the time (0 to 1) becomes `speedup` times as fast. (G. Amdahl noticed in 1967 that the other part sets the limit.)
#
# `attention_flop_share(seqlen, hidden, layers, intermediate, vocab, heads, kv_heads, head_dim, causal=True)` returns
# attention's fraction (0 to 1) of the floating-point operations (FLOPs) of one pass of a Llama over `seqlen` tokens.
# Count a multiplication with its addition as 2 FLOPs, and only these terms:
#
# | where | matrix products | how often |
# | --- | --- | --- |
# | projections | q and o: `hidden` × `heads * head_dim` each; k and v: `hidden` × `kv_heads * head_dim` each | every token, every layer |
# | gated MLP | gate, up, down: `hidden` × `intermediate` each | every token, every layer |
# | output layer | `hidden` × `vocab` | every token, once |
# | **attention** | $QK^\top$ and $PV$: $4 N^2 d$ FLOPs a query head, half of that if `causal` | every layer |
#
# <details><summary>Hint 1: a nudge</summary>
#
# Add up *times*, not speed-ups. Which rows of the table grow with the square of the length?
#
# <details><summary>Hint 2: the idea</summary>
#
# The time before is 1. The time after is `1 - share`, plus what is left of `share`. A product of a vector with a matrix
# of $a \times b$ numbers takes $2ab$ FLOPs. Query heads that share a key head still compute their own scores.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# amdahl: the old time over the new time
# attention_flop_share:
#     one layer and token: multiply-adds of the four projections and the three matrices of the MLP
#     rest = 2 * seqlen * (layers * those + the output layer)
#     attention = the table's last row, times layers and heads
#     the share is attention over everything
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-4-amdahl", "locked": false, "schema_version": 3, "solution": true, "task": false}
def amdahl(share, speedup):
    """Speed-up of the whole, when a share of its time is sped up."""
    ### BEGIN SOLUTION
    return 1 / ((1 - share) + share / speedup)
    ### END SOLUTION


def attention_flop_share(
    seqlen, hidden, layers, intermediate, vocab, heads, kv_heads, head_dim, causal=True
):
    """Fraction of attention in the FLOPs of one pass of a Llama over seqlen tokens."""
    ### BEGIN SOLUTION
    projections = hidden * (2 * heads + 2 * kv_heads) * head_dim
    mlp = 3 * hidden * intermediate
    rest = 2 * seqlen * (layers * (projections + mlp) + hidden * vocab)
    attention_flops = layers * heads * 4 * seqlen**2 * head_dim / (2 if causal else 1)
    return attention_flops / (attention_flops + rest)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-4-amdahl-speedup", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_amdahl(amdahl)
### BEGIN HIDDEN TESTS
checks.check_amdahl(amdahl, seed=41)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-4-amdahl-share", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_attention_share(attention_flop_share)
### BEGIN HIDDEN TESTS
checks.check_attention_share(attention_flop_share, seed=42)
### END HIDDEN TESTS

# %% [markdown]
# First your count, for SmolLM2:

# %%
own_amdahl = checks.solution_or_reference(
    amdahl, checks.ex_2_4_amdahl.overall_speedup, checks.check_amdahl
)
own_share = checks.solution_or_reference(
    attention_flop_share, checks.ex_2_4_amdahl.flop_share, checks.check_attention_share
)
sizes_of = {"hidden": 576, "layers": 30, "intermediate": 1536, "vocab": 49_152}
smollm2_heads = {"heads": 9, "kv_heads": 3, "head_dim": 64, "causal": True}
shares = pd.Series({2**n: own_share(2**n, **sizes_of, **smollm2_heads) for n in range(8, 18)})
half_at = next(n for n in range(1, 10**6) if own_share(n, **sizes_of, **smollm2_heads) >= 0.5)
checks.compare_prediction("Half of the FLOPs", predicted_half, half_at, "tokens")
plotting.plot_share(
    shares, title=f"From {half_at:,} tokens on, attention is most of the arithmetic"
)


# %% [markdown]
# Now use the law. It needs two numbers. The first is the gain of attention *alone*: notebook 1's measurement, with this
# model's heads. The second is attention's share of the *time*: give the model an attention that does *nothing*, and see
# how much time is left.


# %%
def nothing(module, query, key, value, attention_mask, **kwargs):
    return query.transpose(1, 2).clone()


models.register_attention("nothing", nothing)
attentions = ["standard", "nothing", "flash"]
bounds = {"lengths": lengths[-1:], "max_seconds": 0.3}
whole = models.measure_model(model, ids, attentions=attentions, **bounds)  # about 10 s
ran = models.attention_used(model)[0].backend  # what "flash" stands for here
ms = whole.set_index("backend").median_ms
cases = grid(["standard", ran], lengths[-1:], **smollm2_heads)
alone = run_grid(cases, device=device, measure_error=False, max_seconds=0.4)
gain_alone = speedup(alone, over="standard").set_index("backend").speedup[ran]

# %%
share = 1 - ms.nothing / ms.standard
law = {
    "attention's share of the FLOPs": own_share(lengths[-1], **sizes_of, **smollm2_heads),
    "its share of the time": share,
    "its gain alone": gain_alone,
    "predicted gain of the model": own_amdahl(share, gain_alone),
    "measured gain": ms.standard / ms.flash,
    "limit": 1 / (1 - share),
}
if not (0 < share < 1 and ms.flash < ms.standard):
    print("Noise: something else used this machine meanwhile. Run the two cells again.")
quiet = [0.12, 0.40, 3.53, 1.41, 1.37, 1.68]
table = pd.DataFrame({f"here, {lengths[-1]:,} tokens": law})
table.assign(**{"recorded, two quiet CPU cores, 1,024": quiet}).round(2)

# %% [markdown]
# *Limit* is the gain if attention took no time. Note:
#
# - The textbook's share of the time is larger than its share of the FLOPs. Part of the surplus is
#   arithmetic: it also computes the hidden pairs, which these FLOPs leave out (with `causal=False` the share is 0.21 at
#   1,024 tokens). The rest is the traffic of $S$ and
#   $P$, the mask, and the exponentials.
# - Prediction and measurement should be close but not equal: timed alone, attention finds its inputs in the caches. A
#   share outside 0 to 1, or a gain far from the prediction, is noise.
# - The share grows with the length. In a short text the MLPs decide, and no attention kernel can help.

# %% [markdown]
# ## 2.10 · Heads, head dimension, dtype
# *Further (optional) · 4 minutes*
#
# The next cell measures attention alone, 512 tokens, causal, width 512, in five variants: 16 heads of 32, 8 of 64, 4 of
# 128, a batch of 4, and bfloat16. Guess: in which of them does FlashAttention gain most over the textbook, and in which
# least?

# %%
predicted_most, predicted_least = None, None  # such as "batch 4"

# %%
base = {"heads": 8, "head_dim": 64, "batch": 1, "dtype": "float32", "causal": True}
changes = [
    {"heads": 16, "head_dim": 32},
    {},
    {"heads": 4, "head_dim": 128},
    {"batch": 4},
    {"dtype": "bfloat16"},
]
cases = [case for change in changes for case in grid(["standard", fused], [512], **base | change)]
configured = run_grid(cases, device=device, measure_error=False, max_seconds=0.1)
configured = speedup(configured, over="standard")
configured["extra memory, MiB"] = configured.peak_memory_bytes / 2**20
configured["time, ms"] = configured.median_ms
print(f"you predicted: most {predicted_most}, least {predicted_least}")
axes = ["batch", "heads", "head_dim", "dtype", "backend"]
configured[[*axes, "time, ms", "speedup", "extra memory, MiB"]].round(2)

# %% [markdown]
# - **Heads.** The products take the same FLOPs for every cut of the width. The textbook's memory grows with the number
#   of heads, since each has its own scores; FlashAttention's hardly changes.
# - **Batch.** FLOPs, memory and roughly FlashAttention's time grow in proportion. The textbook's time may grow faster:
#   four times the scores may no longer fit into a cache.
# - **dtype.** On many CPUs the gain is smaller in bfloat16, or even a loss: the textbook's matrix products use the
#   processor's bfloat16 instructions, from which PyTorch's CPU FlashAttention gains little. It still saves memory (half
#   of the bytes, as each score has half as many). On GPUs, FlashAttention is made for half precision. Measure on the
#   machine that you will use.

# %% [markdown]
# ## 2.11 · A precision policy
# *Further (optional) · 17 minutes*
#
# Half precision halves the weights, and a decode step waits for the weights. But float16 cannot hold numbers from
# 65,520 on (notebook 1). Does this happen in practice? Look at the *residual stream*, the sum that runs through all
# layers and to which each adds its part:

# %%
with torch.inference_mode():
    stream = model(ids[:, :64], output_hidden_states=True, use_cache=False).hidden_states[:-1]
figure = plotting.Chart(figsize=(7.2, 3.4))
axes = figure.subplots()
for name, pick in (("largest", torch.max), ("median", torch.median)):
    axes.semilogy([pick(x.abs()).item() for x in stream], marker="o", label=name)
axes.axhline(65_504, color="black", linestyle=":", label="the end of float16")
axes.set(xlabel="layer", ylabel="magnitude in the residual stream")
axes.legend(loc=(0.7, 0.53), frameon=False)
figure.headline("A few numbers of the stream are far larger than the rest", "SmolLM2, 64 tokens")
figure

# %% [markdown]
# Somewhere between layers 9 and 12 the largest number jumps to ten thousand times the median, more than a third of
# float16's limit. It stays that large until the last layers. Such *massive activations* are normal in pretrained Llamas (M. Sun, X. Chen, J. Z.
# Kolter, Z. Liu: *Massive Activations in Large Language Models*, 2024, arXiv:2402.17762). bfloat16 has the range for
# them, but coarser steps.

# %%
from labsupport.precision import FlashAttentionConfig, apply_precision_policy

FlashAttentionConfig()


# %% [markdown]
# ### Exercise 2-5 · A precision policy for inference
# ●●○ · 15 minutes · 4 points
#
# A `FlashAttentionConfig` names a dtype for each component of a model; `apply_precision_policy(model, config)` applies it.
#
# | component | what it is |
# | --- | --- |
# | `attention` | q, k and v, as the kernel gets them |
# | `attention_weights` | the projections that make q, k, v and the output; not $P$ |
# | `mlp`, `embedding`, `head` | their weights and products |
# | `norm_statistics`, `norm_weights` | the mean square that a norm computes; its weights |
# | `residual` | the stream that runs through all layers |
# | `loss`, `optimizer` | training only |
#
# Write `my_policy(device_type, capability)`, which returns a config for running a pretrained Llama.
#
# | `device_type` | `capability` | what it has |
# | --- | --- | --- |
# | `"cpu"` | `None` | every dtype |
# | `"cuda"` | a pair such as `(9, 0)`, at least `(8, 0)` | bfloat16 and float16; FlashAttention's kernels take these two only |
# | `"cuda"` | before `(8, 0)`, such as `(7, 5)` | float16, but no bfloat16 |
#
# The checks run a small Llama for eight devices:
#
# - **Dtypes.** The device has each component's dtype. `norm_statistics` stay in float32. (Kernels compute the softmax
#   in float32 anyway.)
# - **Range.** No NaN, and logits within 2% of float32's (in norm), with *massive activations*: at a text's first token,
#   two MLPs each add one huge number to the residual stream. On devices with bfloat16 it is 100,000. On older GPUs it
#   is 40,000, which fits into float16. Does the sum of both?
# - **Memory.** The weights take at most 55% of float32's bytes.
#
# Inference has neither loss nor optimizer, so those dtypes do not matter.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which component is a sum over all layers? Which dtypes hold 80,000?
#
# <details><summary>Hint 2: the idea</summary>
#
# Begin with `FlashAttentionConfig()`, printed above, and name what has to differ, as in
# `FlashAttentionConfig(mlp=torch.float16)`. Pairs are compared entry by entry: `(7, 5) < (8, 0)` is `True`. `None`
# cannot be compared with a pair.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# on a CUDA device before (8, 0):
#     float16 for what the kernels and matrix products take, and for the weights
#     a wider dtype for the one component whose numbers get too large
# elsewhere: bfloat16 for all of these
# everywhere: float32 for the statistics of the norms
# ```
# </details></details></details>


# %% nbgrader={"grade": false, "grade_id": "ex-2-5-policy", "locked": false, "schema_version": 3, "solution": true, "task": false}
def my_policy(device_type, capability):
    """The FlashAttentionConfig in which a pretrained Llama runs well on this device."""
    ### BEGIN SOLUTION
    if device_type == "cpu" or capability >= (8, 0):
        return FlashAttentionConfig()  # bfloat16, and float32 for the statistics of norms
    parts = "attention", "attention_weights", "mlp", "embedding", "norm_weights", "head"
    half = dict.fromkeys(parts, torch.float16)
    return FlashAttentionConfig(**half, residual=torch.float32)  # the range of the stream
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-2-5-policy-devices", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_policy_devices(my_policy)

# %% nbgrader={"grade": true, "grade_id": "ex-2-5-policy-range", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_policy_range(my_policy)
### BEGIN HIDDEN TESTS
checks.check_policy_range(my_policy, seed=52)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-5-policy-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_policy_memory(my_policy)

# %% [markdown]
# This picture is from a recorded *training* run, where the gradients need range, too:
#
# ![Recorded: a small GPT-2 trained under several policies. bfloat16, and float16 with a scaled loss, follow float32 more closely than another seed does; float16 with an unscaled loss does not.](../theory/figures/gpt2-policies.png)
#
# Now the real model reads the same text under `FlashAttentionConfig.bfloat16()` and in float32. Guess: by how much does
# the NLL of 2.50 change?

# %%
predicted_change = None  # your guess, in nats a token

# %%
import copy

models.set_attention(model, "flash")
half = copy.deepcopy(model)
apply_precision_policy(half, FlashAttentionConfig.bfloat16())
nlls = [models.negative_log_likelihood(m, ids[:, :512]) for m in (model, half)]
weights = [sum(p.nbytes for p in m.parameters()) / 2**20 for m in (model, half)]
change = abs(nlls[1] - nlls[0])
checks.compare_prediction("Change of the NLL", predicted_change, change, "nats")
print(f"weights: {weights[0]:.0f} MiB in float32, {weights[1]:.0f} MiB under the policy")

# %% [markdown]
# Every layer now rounds to three digits, and the model predicts as well as before: rounding errors average out. An
# overflow does not. So check the range first, and the digits second.

# %% [markdown]
# ## 2.12 · Recorded: longer texts, and a data-centre GPU
# *Further (optional) · 3 minutes*
#
# These results were recorded with the lab's commands; `provenance` has the command, device and date of each. (The chart
# at the top of this notebook is `smollm2-cpu`.) Guess: writing for one request on an H200, how many times as many
# tokens per second does one CUDA graph for the whole step bring over an ordinary loop?

# %%
predicted_graph = None  # your guess, a number

# %% [markdown]
# A Llama of 110 million parameters in bfloat16 serves one request (its weights are random, which does not change the
# time). *Bound* is the rate at which the memory could deliver weights and cache, by its measured bandwidth.

# %% tags=["nbval-check-output"]
from labsupport.profiling import load_run

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
# All loops compute the same. The difference between 110 and 4,600 tokens a second is everything *around* the
# arithmetic: an ordinary loop launches several hundred kernels for each token from Python, one after the other.
# `graphed` (`labsupport/models/generation/cuda_graph.py`) replays one CUDA graph for each token, the choice of the
# token included. The graph holds the lab's own kernels, at most six for each layer (`attention/kernels/decode.py` and
# `models/generation/linear.py`). Transformers' own compiled step, with its static cache, writes 600. The memory would
# allow 4.0 times as many as `graphed` writes. For 64 requests together it writes 94,000 tokens a second.
#
# Finally, training GPT-2 medium on an H200, 8,192 tokens a step, in sequences of growing length:

# %%
steps = load_run("h200-training").rename(columns={"name": "backend"}).drop(columns="batch")
steps["direction"] = "forward+backward"
plotting.plot_memory(
    steps,
    title="With eager, 8,192 tokens do not fit; FlashAttention's memory stays the same",
    references=[plotting.Reference("memory of the GPU", 139.8 * 1024)],
)


# %% [markdown]
# FlashAttention needs the same memory for 8,192 tokens in one sequence or in eight. (What remains is the model, its
# gradients, the optimizer's step, and the logits.) With `eager` the memory grows with the length, until the card is
# full: the cross. `flash_triton` is this lab's kernel; notebook 4 explains it.

# %% [markdown]
# ## 2.13 · A cache of your own
#
# *Core · 40 minutes*
#
# So far, Transformers managed the cache. Now you write one, and do what serving programs do with it: attend in parts,
# store it in pages, and compress the keys to 8 bits.
#
# ### Exercise 2-6 · A cache, in parts, in pages, in 8 bits
# ●●● · 35 minutes · 5 points
#
# #### Step 1 · Append · 12 minutes, 2 points
#
# Two buffers, `self.k` and `self.v`, `(batch, kv_heads, room, head_dim)`, hold a layer's keys and values. The first
# `self.length` of the `room` tokens are filled. `append(k, v)` takes new tokens, `(batch, kv_heads, new, head_dim)`,
# and returns all keys and values so far, `(batch, kv_heads, length, head_dim)`. If the room is too small, make two new
# buffers and copy the old tokens: twice the room, or as much as the new tokens need, if that is more. The
# function `replay` shows what your class returns.
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


def replay(pieces):
    """Feed pieces (k, v) to a new cache: what it returns each time, and its room."""
    cache = KVCache()
    return [(*(x.clone() for x in cache.append(k, v)), cache.k.shape[2]) for k, v in pieces]


# %% nbgrader={"grade": true, "grade_id": "ex-2-6-cache-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_cache_values(KVCache)
### BEGIN HIDDEN TESTS
checks.check_cache_values(KVCache, seed=31)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-2-6-cache-growth", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_cache_growth(KVCache)
### BEGIN HIDDEN TESTS
checks.check_cache_growth(KVCache, seed=32)
### END HIDDEN TESTS

# %% [markdown]
# Each of SmolLM2's 30 layers now gets one of your caches. Is the text the same as with Transformers' cache?

# %%
models.set_attention(model, "flash")
own = checks.solution_or_reference(KVCache, "dynamic", checks.check_cache_values)
texts = [
    models.generate(model, tokenizer, prompts[0], max_new_tokens=16, cache=cache).text
    for cache in (own, "dynamic")
]
print(texts[0])
print("the same text as with Transformers' cache:", texts[0] == texts[1])

# %% [markdown]
# #### Step 2 · Decode in parts · 15 minutes, 1 point
#
# A kernel starts one *program* for each block of queries of each head. Each multiprocessor of a GPU computes one or two
# programs at a time, and an H200 has 132 of them. A decode step of one request has one query and, say, 32 heads: 32
# programs. The lab's forward kernel works like that. **Predict first**: which share of the memory's bandwidth does it
# reach with 32 heads and 32,768 keys?

# %%
predicted_share = None  # your guess, from 0 to 1

# %% tags=["nbval-check-output"]
from labsupport.profiling import load_run

steps = load_run("decode-h200").query("batch == 1 and implementation in ['flash_triton', 'decode']")
share = steps.pivot(index="keys", columns="implementation", values="of_copy").round(2)
checks.compare_prediction("Share", predicted_share, share.flash_triton.iloc[0])
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
# *Keys in parts* is the lab's decode kernel: each program attends to one part of the keys, and a second, small kernel
# merges the parts. Now there are enough programs to keep the memory busy. Without parts the share is even less than 32
# of 132, probably because a program alone on its multiprocessor has too few loads in flight. (1.03 is no error: the
# unit is the bandwidth of a plain copy, and reading alone can be a little faster.)
#
# The merge is exact. With the log-sum-exp $L_p = \log \sum_{j \in p} e^{s_j}$ of each part $p$, and its output $o_p$:
#
# $$o = \sum_p w_p\, o_p, \qquad w_p = \frac{e^{L_p}}{\sum_{p'} e^{L_{p'}}}$$
#
# Two parts by hand: part 1 has the scores 1 and 2, part 2 the score 3.

# %% tags=["nbval-check-output"]
parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
lses = torch.stack([part.logsumexp(0) for part in parts])
print("log-sum-exps:", [f"{x:.3f}" for x in lses.tolist()])
print("weights:     ", [f"{x:.3f}" for x in lses.softmax(0).tolist()])
print("softmax of all three:", [f"{x:.3f}" for x in torch.cat(parts).softmax(0).tolist()])


# %% [markdown]
# The second part's weight is the probability of its only key; the first part's is that of its two keys together.
#
# Write `split_decode(q, k, v, num_splits)`: `q` is `(heads, 1, head_dim)`, `k` and `v` are
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


# %% nbgrader={"grade": true, "grade_id": "ex-2-6-split-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_split_decode(split_decode)
### BEGIN HIDDEN TESTS
checks.check_split_decode(split_decode, seed=33)
### END HIDDEN TESTS

# %% [markdown]
# Notebook 3 uses the same merge for parts on several devices.
#
# #### Step 3 · Pages, and 8 bits · 8 minutes, 2 points
#
# A server does not know how long an answer becomes, and buffers for the longest case would waste most of the memory. So
# it cuts memory into *pages* of 16 tokens, and each text has a table of its pages:
#
# ![A pool of eight pages. Text A lies in pages 5, 0 and 7, text B in pages 2 and 6, each in the order of its table; three pages are free.](../theory/figures/kv-pages.png)
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
# What does that cost in accuracy? Compare the keys of one layer of SmolLM2 (from section 2.7) in 8 bits and in
# bfloat16. **Predict first**: which error is smaller?

# %%
predicted_smaller = None  # your guess, "int8" or "bfloat16"

# %%
from labsupport.attention import oracle_attention

keys, values = (x[0].float() for x in (kept.layers[-1].keys, kept.layers[-1].values))
query = keys[:, -1:]  # any vector of the right size
exact = oracle_attention(query, keys, values)[0]
print("you predicted:", predicted_smaller)
codes, scale = quantise_keys(keys)
for name, rounded in {"int8": codes * scale, "bfloat16": keys.bfloat16().float()}.items():
    out = oracle_attention(query, rounded, values)[0]
    error = (rounded - keys).norm() / keys.norm()
    print(f"{name:9} keys {error:.2%} off, output {(out - exact).norm() / exact.norm():.2%} off")

# %% [markdown]
# bfloat16 has 8 significant bits at every size. int8 has 7 and a sign for the head's largest number, and fewer for
# smaller ones, so one outlier makes all other keys of its head less precise. That is why serving programs use a scale
# for each channel or for small blocks. [Chapter 9](../theory/09-inference.md#paging-continuous-batching-speculation)
# continues from here.

# %% [markdown]
# ## 2.14 · Find the fault
# *Further (optional) · 15 minutes*
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
# One NaN makes everything after it NaN. `PrecisionTracker` watches each module, and names the first one:

# %%
from labsupport.precision import PrecisionTracker

with torch.inference_mode(), PrecisionTracker(ten_layers) as tracker:
    ten_layers(words)
print(tracker.report())
frame = tracker.to_dataframe()  # a row for each call of a module: name, dtypes, largest, nan, ...
plotting.plot_dtype_flow(frame, title="float16 throughout, and NaN from one module on")


# %% [markdown]
# ### Exercise 2-8 · NaN in one of ten layers
# ●●○ · 12 minutes · 0 points (optional)
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
# | B | the residual stream has outgrown float16 there |
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


# %% nbgrader={"grade": true, "grade_id": "ex-2-8-cause-letter", "locked": true, "points": 0, "schema_version": 3, "solution": false, "task": false}
checks.check_nan_cause(cause)

# %% nbgrader={"grade": true, "grade_id": "ex-2-8-fault-output", "locked": true, "points": 0, "schema_version": 3, "solution": false, "task": false}
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
# equal. A textbook in float16 meets both problems, as soon as one layer attends sharply; FlashAttention's kernels store
# the tile of scores in float32, and meet neither. The [field guide](../theory/10-field-guide.md#nan) lists more causes
# of NaN, by likelihood.

# %% [markdown]
# ## What you measured
#
# - Exchanging a model's attention changes its NLL, logits, gradients and greedy text by rounding only.
# - `use_flash_attn=True` has no effect; only a record of what ran proves something.
# - Long texts gain time and memory in reading and training; short ones do not.
# - In decoding, queries are the *last* tokens: align the mask at the bottom right. The KV cache is worth its memory.
# - A decode step waits for weights and cache, and a small model also for the calls from Python. Batches, graphs, fewer key/value heads and smaller dtypes help it;
#   FlashAttention does not.
# - Amdahl's law: the share and the gain of a part give the gain of the whole.
# - When you choose a dtype, range comes before precision.
#
# ### Three questions
#
# <details><summary>1. A colleague replaced attention by FlashAttention and sees no gain in tokens per second. The model answers short questions, one at a time. What do you say?</summary>
#
# This was to be expected. The time goes to decode steps, which are bound by reading weights, and at batch 1 by
# launching kernels. A CUDA graph, a larger batch or a smaller dtype would help. For long prompts the *time to the first
# token* will fall.
# </details>
#
# <details><summary>2. Why does a registered attention function also need a mask function?</summary>
#
# Transformers calls it to make the mask of each batch. Without one, layers attend to padding like text. There is no
# error; only the results are wrong.
# </details>
#
# <details><summary>3. In a static cache 600 of 1,024 slots are filled, and 4 new tokens come. Which keys may the first of them see, and what would a bottom-right mask over all slots say?</summary>
#
# It is at position 600, so it sees keys 0 to 600. Aligned with the buffer's end, the mask would let it see keys up to
# 1,020, in slots that are still empty. Align it with the end of the *filled* keys, 604.
# </details>
#
# ### Read on
#
# - [Chapter 9 of the theory](../theory/09-inference.md): both phases on the roofline, split-KV decoding, paging, speculation.
# - [Chapter 6](../theory/06-precision.md), for section 2.11.
# - [Masks and scores of your own](further/masks.ipynb), with exercise 2-7, and [training in low
#   precision](further/low-precision-training.ipynb), with exercise 2-9.
# - N. Shazeer: *Fast Transformer Decoding: One Write-Head is All You Need* (2019), arXiv:1911.02150, and J. Ainslie et
#   al.: *GQA* (2023), arXiv:2305.13245. Why keys and values are shared.
# - `labsupport/models/integration/`: how padding becomes packed sequences; `labsupport/models/generation/steps.py`: a
#   Llama in sixty lines.

# %% [markdown]
# ### How far you are
#
# The checks run once more, on your definitions. (`labsupport progress`, in a terminal, reads the saved notebooks.)

# %%
from labsupport.course.progress import show_progress

show_progress("02", globals())
