# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · Performance analysis
#
# ![Speed of kernels on an H200 against FLOPs per byte: the textbook lies under the slope that the memory sets; two fused kernels reach 301 and 516 of the roof's 990 TFLOP/s.](../theory/figures/roofline-h200.png)
#
# The same mathematics on the same GPU; hollow: the textbook's steps, by formula.
#
# **After this notebook you can**
#
# - find with a profiler where the time of a call goes;
# - write a FlashAttention kernel in Triton, and run a language model on it;
# - count FLOPs and bytes, and name what bounds a case;
# - say how well two numbers predict a time, and which rows test that;
# - choose an implementation, with reasons.
#
# **Time**: about 150 minutes (estimated), of which the exercises take 91. A good place to pause: after 4.2.
#
# **You need** notebooks 1 and 2. A laptop is enough: numbers of a large GPU are recorded. Exercise 4-3 needs Triton, so
# Linux or Windows' WSL; on a Mac, read it.
#
# **Theory**, not required: chapters [4](../theory/04-io-complexity.md), [5](../theory/05-from-v1-to-v4.md) and
# [8](../theory/08-performance-model.md), and the [glossary](../theory/glossary.md).
#
# **Exercises**: 4-3, 4-1, 4-6 (other numbers: bonus, in `further/`).

# %%
import math
from functools import partial
from time import perf_counter

import numpy as np
import pandas as pd
import torch

from labsupport import analysis, checks, models, plotting
from labsupport.attention import attention
from labsupport.profiling import Case, environment_card, grid, load_run, run_grid

torch.manual_seed(0)
environment_card()

# %%
gpu = torch.cuda.is_available()
device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
batch, heads, head_dim, seqlen = (4, 16, 64, 4096) if gpu else (1, 4, 64, 1024)
shape = batch, seqlen, heads, head_dim
q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))

# %% [markdown]
# ## 4.1 · Where does the time go?
#
# A *profiler* shows which part of a call takes the time: it records each operator, and on a GPU each kernel. Textbook
# attention is two matrix products and a softmax, and nearly all of its FLOPs are in the products. **Predict first**: what
# share of its *time* do they take?

# %%
predicted_share = None  # your guess, a number between 0 and 1

# %%
from labsupport.profiling.trace import trace


def milliseconds(call):
    start = perf_counter()
    call()
    if gpu:
        torch.cuda.synchronize()
    return 1e3 * (perf_counter() - start)


textbook = partial(attention, q, k, v, backend="standard")
flash = partial(attention, q, k, v, backend="sdpa_flash")
first_calls = [milliseconds(textbook) for _ in range(7)]  # for later
traces = {"standard": trace(textbook), "sdpa_flash": trace(flash)}
table = traces["standard"].kernels()
products = table[table.operator.isin(["aten::bmm", "aten::mm"])].share.sum()
checks.compare_prediction(
    "Share of the matrix products", predicted_share, products, possible=(0, 1)
)

# %%
columns = {"name": "row", "calls": "calls", "device_ms": "ms", "share": "share"}
columns |= {"flops": "GFLOP", "bytes": "MiB moved"}
tables = {}
for name, seen in traces.items():
    top = seen.kernels().query("share >= 0.01").head(4)
    top = top.assign(name=top.name.str[:50], flops=top.flops / 1e9, bytes=top.bytes / 2**20)
    top = top.assign(share=top.share.map("{:.0%}".format)).round(2)
    tables[name] = top[[*columns]].rename(columns=columns).astype(object).fillna("not counted")
pd.concat(tables).droplevel(1)

# %% [markdown]
# Most of the rest goes to the softmax, which has hardly any FLOPs. It reads and writes $N \times N$ numbers, and on a CPU its
# exponentials are slow too. FlashAttention's kernel is a single row: a profiler cannot see inside it.
#
# ### Four traps
#
# - **FLOPs of fused kernels.** The profiler counts matrix products, and little else. PyTorch's second counter,
#   `FlopCounterMode`, knows fused kernels on GPUs, but ignores a causal mask. So count by formula (section 4.3).
# - **The first call** also pays for work that happens once, such as compiling a kernel. Later calls vary. So `measure_time`
#   warms up, repeats, and reports a median.
# - **A clock that does not wait.** A GPU works while Python goes on. Read right after the call, the clock shows the
#   *launch*: the time in which Python hands the kernel over. So `milliseconds` calls `torch.cuda.synchronize()` first.
# - **A busy GPU is not a well-used one.** `nvidia-smi` shows 100% if some kernel ran all the time, even with one thread.

# %%
from torch.utils.flop_counter import FlopCounterMode

true = 4 * batch * heads * seqlen**2 * head_dim / 1e9
with FlopCounterMode(display=False) as counter:
    flash()
by_profiler = traces["sdpa_flash"].kernels().flops.sum() / 1e9
by_counter = counter.get_total_flops() / 1e9
print(
    f"FlashAttention's GFLOP: profiler {by_profiler:.2f}, counter {by_counter:.2f}, true {true:.2f}"
)
over_fastest = " ".join(f"{ms / min(first_calls):.2f}" for ms in first_calls)
print(f"first calls of the textbook, over the fastest of them: {over_fastest}")
if gpu:
    start = perf_counter()
    flash()
    print(f"without waiting {1e3 * (perf_counter() - start):.3f} ms,", end=" ")
    print(f"with waiting {milliseconds(flash):.3f} ms")
else:
    print("On a CPU a call returns when its work is done: there is nothing to wait for.")

# %% [markdown]
# ## 4.2 · Your own kernel
#
# What happens inside that single row?
#
# ![Left: the scores of one head in 4 by 4 tiles; a row of tiles belongs to one program. Right: three multiprocessors run one or two programs each; others wait. Q, K, V and O are in slow memory.](../theory/figures/kernel-programs.png)
#
# A GPU has many *multiprocessors*, 132 on an H200. Each has a small fast memory, and *tensor cores*, which multiply
# small matrices. A kernel is started as many *programs*. All run the same code, each for its own block of the output.
# A program holds one *tile* of keys and values at a time in fast memory, beside its queries and $m$, $l$, $O$.
#
# In *Triton* you write what one program does. `tl.program_id(0)` is its number; `tl.load` and `tl.store` move blocks
# between the memories. Without a GPU, Triton's interpreter runs the same code with NumPy, slowly. This kernel adds two
# vectors:
#
# ![Ten numbers and three programs of four lanes: two lanes of the last program lie beyond the end; their mask is False.](../theory/figures/triton-programs.png)

# %%
try:
    import triton
    import triton.language as tl
except ImportError:  # Triton exists for Linux: elsewhere read on, the check cells say what to do
    from types import SimpleNamespace

    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=int)
from labsupport.attention.kernels import mode
from labsupport.checks.guard import check_guard, guarded_zeros

can_run = mode.missing() is None


@triton.jit
def add_kernel(X, Y, OUT, n, BLOCK: tl.constexpr):
    """One program adds one block. X, Y and OUT point to the first elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # the places (lanes) of this block
    inside = i < n  # the last block may reach beyond the end
    x = tl.load(X + i, mask=inside)
    y = tl.load(Y + i, mask=inside)
    tl.store(OUT + i, x + y, mask=inside)


if can_run:
    x = torch.arange(10.0, device=device)
    y, out = 100 * x, torch.empty_like(x)
    add_kernel[(3,)](x, y, out, 10, BLOCK=4)  # three programs for ten numbers
    print(out.tolist())
else:
    print("Kernels cannot run here:", mode.missing())

# %% [markdown]
# A `tl.constexpr` is fixed when the kernel is compiled. A store without a mask overwrites what comes after the tensor, and
# may crash Python. So the function that starts your kernel leaves some room there (`guarded_zeros`) and checks it.
#
# FlashAttention does the same in two dimensions: a program takes a block of queries and loops over tiles of keys. These
# are all steps for 10 tokens, blocks of 4, and a causal mask. Move the slider:

# %%
from IPython.display import display

from labsupport.analysis.explorer import kernel_walk_slider

display(kernel_walk_slider(10, block=4))
plotting.plot_kernel_walk(10, block=4)


# %% [markdown]
# Three tiles are *skipped*: no query sees a key in them. Only tiles that the diagonal or the end of the *keys* cuts need
# their *scores* masked. Loads and stores of rows beyond the last query are always masked.
#
# ### Exercise 4-3 · A FlashAttention kernel, in two steps
# ●●● · essential · 55 minutes · 14 points
#
# #### Step 1 · The heart · 25 minutes, 5 points
#
# Write `update(m, l, acc, scores, v) -> (m, l, acc)`. The kernel calls it once for each tile of keys.
#
# | | shape | dtype |
# | --- | --- | --- |
# | `m`, `l` | `(block_q,)` | float32; begin as -inf and 0 |
# | `acc` | `(block_q, head_dim)` | float32; begins as 0 |
# | `scores` | `(block_q, block_k)` | float32; -inf hides a key |
# | `v` | `(block_k, head_dim)` | that of the inputs, float16 say |
#
# The scores are already multiplied by $\log_2 e$: so `tl.exp2(scores)` is $e$ to the power of the plain scores. After the last tile, `acc / l` must be attention's output, and `m + log2(l)`
# its log-sum-exp in base 2. A row that has seen no key keeps `m` = -inf, `l` = 0 and `acc` = 0.
#
# You have `tl.maximum(a, b)`, `tl.max(x, 1)`, `tl.sum(x, 1)`, `tl.exp2(x)`, `tl.where(condition, a, b)`, `tl.dot(a, b)`, `x.to(dtype)`,
# `x[:, None]`, and arithmetic. Minus infinity is `float("-inf")`. An `if` on a single number or a `tl.constexpr`
# is fine, on a tensor not. Without a GPU, `print(x)` inside a kernel works. `tl.dot` wants both factors in one dtype, and adds up in float32: round the
# weights $P$ to the dtype of `v` for that product, and keep everything else in float32.
#
# <details><summary>Hint 1: a nudge</summary>
#
# It is the online softmax of exercise 1-3 for a tile. Which quantities must shrink when the maximum rises?
#
# <details><summary>Hint 2: the idea</summary>
#
# Sum and accumulator shrink by the same factor $\alpha = 2^{m_\text{old} - m_\text{new}}$; `alpha[:, None]` for the
# accumulator. A row without a key gives $-\infty - (-\infty)$: subtract 0 there instead of `m_new`.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# m_new   the larger one of m and the tile's largest score, row by row
# shift   m_new, but 0 where it is -inf
# alpha   2^(m - shift)          p   2^(scores - shift), row by row
# l       l alpha + the row sums of p
# acc     acc alpha + p v, with p in v's dtype
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-3-kernel", "locked": false, "schema_version": 3, "solution": true, "task": false}
@triton.jit
def update(m, l, acc, scores, v):
    """One tile of keys into the running maximum, sum and accumulator."""
    ### BEGIN SOLUTION
    m_new = tl.maximum(m, tl.max(scores, 1))
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = tl.exp2(m - shift)
    p = tl.exp2(scores - shift[:, None])
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
    return m_new, l, acc
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-4-3-kernel-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_update_values(update)
### BEGIN HIDDEN TESTS
checks.check_update_values(update, seed=31)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-3-kernel-extremes", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_update_extremes(update)
### BEGIN HIDDEN TESTS
checks.check_update_extremes(update, seed=32)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-3-kernel-dtype", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_update_dtype(update)


# %% [markdown]
# #### Step 2 · The loop · 30 minutes, 9 points
#
# One program computes `BLOCK_Q` queries of one head. `tl.program_id(0)` is the block of queries, `tl.program_id(1)` the
# head. The beginning and the end are given: they load the block's queries and store the results. You write the loop over tiles
# of keys between them, which calls `update`. (If yours does not pass step 1, write
# `from labsupport.attention.kernels.template import softmax_update` above the kernel, and call that.)
#
# | argument | |
# | --- | --- |
# | `Q, K, V, OUT` | pointers to `(heads, seqlen, D)`. Element (h, n, d) lies at `Q + h * stride_qh + n * stride_qn + d` |
# | `LSE` | pointer to `(heads, n_q)`, float32, contiguous: the natural log-sum-exp |
# | `scale` | $\log_2 e / \sqrt{D}$: multiply the products by it, and the scores are ready for `update` |
# | `n_q`, `n_k` | the numbers of queries and keys; blocks need not divide them |
# | `CAUSAL` | query i sees the keys up to i + `n_k` - `n_q`. Do not load a tile that no query of the block sees |
#
# `tl.load(..., mask=inside, other=0.0)` gives 0 where the mask is false. `tl.arange` takes constants only: write
# `j + tl.arange(0, BLOCK_K)`. Loop over `tl.range(0, stop, BLOCK_K)`; variables of the loop must keep their type. You also
# have `tl.trans(x)` and `tl.minimum(a, b)`.
#
# First make it correct without `CAUSAL`, then with it; in the end mask only the tiles that need it.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Follow program 2 in the drawing above: which tiles does it load, what lies outside of them, and where does its loop end?
#
# <details><summary>Hint 2: one turn of the loop</summary>
#
# Take a tile that needs no mask. A turn has four parts: load `k`, load `v`, compute the scores, call `update`. The given line
# `q_at` shows how to make a tile of pointers: a column plus a row. For `k` and `v` the rows are the tile's keys, with their
# own strides.
#
# <details><summary>Hint 3: the masks</summary>
#
# A load needs a mask because the last tile may reach beyond `n_k`. Its keys that do not exist would get the score 0: make
# these scores -inf, with `tl.where`. A causal mask hides more scores in the same way: compare the tile's keys (a row)
# with the last key that each query (a column) sees.
#
# <details><summary>Hint 4: an outline</summary>
#
# 1. With `CAUSAL`, query i sees i + 1 + `n_k` - `n_q` keys, at most `n_k`; without it, all `n_k`.
# 2. `stop`, where the loop ends: the number of keys that the block's *last* query sees. No query of the block sees more.
# 3. `full`: the number of keys that its *first* query sees. All queries see these: a tile within them needs no mask.
# 4. For each `j` from 0 to `stop`: load, scores, and if the tile reaches beyond `full`, hide scores; `update`.
# </details>
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-3-flash", "locked": false, "schema_version": 3, "solution": true, "task": false}
@triton.jit
def flash_kernel(
    Q, K, V, OUT, LSE, scale, n_q, n_k,
    stride_qh, stride_qn, stride_kh, stride_kn, stride_vh, stride_vn, stride_oh, stride_on,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q queries of one head."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d = tl.arange(0, D)
    existing = rows[:, None] < n_q  # the last block may reach beyond the end
    q_at = Q + head * stride_qh + rows[:, None] * stride_qn + d[None, :]
    q = tl.load(q_at, mask=existing, other=0.0)
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    ### BEGIN SOLUTION
    stop, full = n_k, n_k  # the keys that some query of the block sees, and that all see
    if CAUSAL:
        stop = tl.minimum(n_k, (tl.program_id(0) + 1) * BLOCK_Q + n_k - n_q)
        full = tl.minimum(n_k, tl.program_id(0) * BLOCK_Q + n_k - n_q + 1)
    for j in tl.range(0, stop, BLOCK_K):
        cols = j + tl.arange(0, BLOCK_K)
        k_at = K + head * stride_kh + cols[:, None] * stride_kn + d[None, :]
        v_at = V + head * stride_vh + cols[:, None] * stride_vn + d[None, :]
        k = tl.load(k_at, mask=cols[:, None] < n_k, other=0.0)
        v = tl.load(v_at, mask=cols[:, None] < n_k, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        if j + BLOCK_K > full:  # the diagonal or the end of the keys cuts the tile
            visible = cols[None, :] < n_k
            if CAUSAL:
                visible = visible & (cols[None, :] <= rows[:, None] + n_k - n_q)
            scores = tl.where(visible, scores, -float("inf"))
        m, l, acc = update(m, l, acc, scores, v)
    ### END SOLUTION
    divisor = tl.where(l == 0.0, 1.0, l)  # 1 where a query saw no key
    out_at = OUT + head * stride_oh + rows[:, None] * stride_on + d[None, :]
    tl.store(out_at, acc / divisor[:, None], mask=existing)
    lse = (m + tl.log2(divisor)) * 0.6931471805599453  # log(2)
    tl.store(LSE + head * n_q + rows, lse, mask=rows < n_q)


def my_triton_flash(q, k, v, causal=False, block=64):
    """FlashAttention's out and lse for q, k, v of shape (heads, seqlen, head_dim)."""
    heads, n_q, d = q.shape
    out, lse = guarded_zeros(*q.shape, like=q), guarded_zeros(heads, n_q, like=q.float())
    flash_kernel[(triton.cdiv(n_q, block), heads)](
        q, k, v, out, lse, math.log2(math.e) / math.sqrt(d), n_q, k.shape[1],
        *(stride for x in (q, k, v, out) for stride in x.stride()[:2]),
        D=d, BLOCK_Q=block, BLOCK_K=block, CAUSAL=causal, num_warps=max(1, block // 16), num_stages=4,
    )  # fmt: skip
    check_guard(out, lse)
    return out, lse


# %% nbgrader={"grade": true, "grade_id": "ex-4-3-flash-values", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
checks.check_triton_flash_values(flash_kernel)
### BEGIN HIDDEN TESTS
checks.check_triton_flash_values(flash_kernel, seed=35)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-3-flash-edges", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_triton_flash_edges(flash_kernel)
### BEGIN HIDDEN TESTS
checks.check_triton_flash_edges(flash_kernel, seed=36)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-3-flash-skips", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_triton_flash_skips(flash_kernel)
### BEGIN HIDDEN TESTS
checks.check_triton_flash_skips(flash_kernel, seed=37)
### END HIDDEN TESTS

# %% [markdown]
# Compare your kernel with `flash_triton` and with exact attention in float64, the *oracle*. (A GPU
# times both, too.)

# %%
from labsupport.attention import oracle_attention


def ready(backend):
    """A backend of the lab, for (heads, seqlen, head_dim)."""

    def run(q, k, v, causal):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse = attention(q, k, v, causal=causal, backend=backend, return_lse=True)
        return out[0].transpose(0, 1), lse[0]

    return run


kernels = {"yours": my_triton_flash, "flash_triton": ready("flash_triton")}
kernels |= {"sdpa_cudnn": ready("sdpa_cudnn")} if gpu else {}
some = (torch.randn(8, 4096 if gpu else 96, 64, device=device).half() for _ in range(3))
some = tuple(some)
exact, exact_lse = oracle_attention(*some, causal=True)
for name, kernel in kernels.items():
    call = partial(kernel, *some, causal=True)
    try:
        out, lse = call()
    except Exception as error:
        why = "is not written yet, or fails" if name == "yours" else "does not run here"
        print(f"{name:12} {why}: {type(error).__name__}")
        continue
    off = (out - exact).abs().max(), (lse - exact_lse).abs().max()
    ms = f", {min(milliseconds(call) for _ in range(5)):.3g} ms" if gpu else ""
    print(f"{name:12} output off by {off[0]:.0e}, log-sum-exp by {off[1]:.0e}{ms}")

# %% [markdown]
# ### In a model
#
# Rounding the output to float16 is enough for an error of 0.001. Now put your kernel into notebook 2's model.

# %%
from labsupport.attention import register_backend

reference = checks.ex_4_3_triton_kernels.flash
own_flash = reference
if can_run:
    taken = checks.solution_or_reference(flash_kernel, reference, checks.check_triton_flash_values)
    own_flash = my_triton_flash if taken is flash_kernel else reference
else:
    print("Kernels cannot run here:", mode.missing(), "A loop in PyTorch takes their place.")


def all_heads(q, k, v, causal):
    """(batch, heads, seqlen, head_dim), one head after the other."""
    return own_flash(*(x.flatten(0, 1) for x in (q, k, v)), causal, 16)[0].view(q.shape)


register_backend("my_kernel", all_heads)
smollm2 = models.load_model("smollm2", attention=None, dtype=torch.float32, device=device)
models.set_attention(smollm2.model, "my_kernel")
prompt = "The capital of France is"
said = models.generate(smollm2.model, smollm2.tokenizer, prompt, max_new_tokens=1).text
print(f"{prompt}{said}")
print(models.attention_used(smollm2.model))

# %% [markdown]
# ### How fast?
#
# `exercise_4_3` is the lab's solution, `flash_triton` the same loop with tuned tiles. TFLOP/s of one
# run on an H200 (forward, no mask; other runs vary):

# %% tags=["nbval-check-output"]
speeds = load_run("exercise-h200").query("status == 'ok' and not causal")
speeds = speeds.pivot(index="backend", columns=["head_dim", "seqlen"], values="tflops")
print(speeds.sort_values((128, 16_384)).round().astype(int).to_string())
tuned = load_run("tune-forward-h200").query("seqlen == 4096 and head_dim == 64 and not causal")
slowest = tuned.median_ms.max() / tuned.median_ms.min()
print(
    f"\nflash_triton, 4,096 tokens, head_dim 64: the slowest of {len(tuned)} tilings takes "
    f"{slowest:.1f} times as long as the fastest."
)


# %% [markdown]
# At 4,096 tokens and head_dim 64, `exercise_4_3` reaches 63% of the fastest. Speed depends on
#
# - *tiles*, and how many are loaded ahead: kernels are tuned by measuring;
# - *resources*: a program that needs much fast memory leaves no room for another on its multiprocessor;
# - *overlap*: the exponentials of one tile should be computed while tensor cores multiply another.
#
# ![Three timelines of the same work: in order, tensor cores are busy 59% of the time; pipelined within one group, 84%; with two groups that take turns, 100%.](../theory/figures/versions-overlap.png)
#
# At head_dim 128, cuDNN and FlashAttention-4 (`fa4`) lead: they give groups of threads different jobs, which Triton
# cannot. Gluon, the language
# below Triton, can: [chapter 5](../theory/05-from-v1-to-v4.md) builds `flash_gluon`.

# %% [markdown]
# ## 4.3 · FLOPs, bytes, and a roof
#
# How fast *could* a call be? Its arithmetic takes at least FLOPs / (FLOPs a second), moving its tensors at least bytes / (bytes
# a second). If they overlap perfectly, the call takes the longer of both. The *intensity*, FLOPs for each byte, says which.

# %% [markdown]
# ### Exercise 4-1 · What a pass costs
# ●●○ · essential · 24 minutes · 7 points
#
# | function | returns |
# | --- | --- |
# | `attention_cost(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, *, dtype, causal, backward)` | `(flops, moved)` |
# | `roof(flops, moved, tflops, gb_s)` | `(intensity, least_ms, bound_by)` |
#
# One pass: the forward, or with `backward=True` the backward alone. `seqlen_q <= seqlen_k`; with a causal mask the last query sees all keys.
#
# - `flops`: count a multiply-add as 2 FLOPs. Count matrix products only, and only visible pairs. The backward computes $S$ again, so it
#   has five products.
# - `moved`: bytes, each tensor once. Forward: $Q, K, V$ in; $O$ and $L$ out. Backward: $Q, K, V, O, dO, L$ in; $dQ, dK, dV$ out.
#   $K$, $V$ and their gradients have `kv_heads` heads. $L$, the log-sum-exp, has one float32 for each query of each head. All else
#   is of `dtype`, a `torch.dtype` (`dtype.itemsize` bytes).
# - `intensity`: FLOPs a byte. `least_ms`: arithmetic (`tflops`, $10^{12}$ a second) and transfers (`gb_s`, $10^9$ bytes a second)
#   overlap perfectly. `bound_by`: `"arithmetic"` or `"memory"`, whichever takes longer.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Draw the mask for 3 queries and 5 keys, the last query seeing all five. How many pairs does it hide?
#
# <details><summary>Hint 2: the idea</summary>
#
# The last query sees all keys, the one before it one less, and so on: the mask takes away $0 + 1 + \dots + (N_q - 1)$
# pairs. Write $Q$'s and $K$'s bytes down once, and count them: $O$, $dO$ and $dQ$ are as large as $Q$.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# pairs   N_q N_k, less the hidden ones        flops   2 products of 2 d FLOPs a pair; backward 5
# q, k    bytes of Q and of K;  L: 4 bytes     moved   forward 2 q + 2 k + L;  backward: the list above
# roof    both times in ms:  the longer one, and its name
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-1-cost", "locked": false, "schema_version": 3, "solution": true, "task": false}
def attention_cost(
    batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, *, dtype, causal, backward
):
    """(FLOPs, compulsory bytes) of one pass."""
    ### BEGIN SOLUTION
    pairs = seqlen_q * seqlen_k
    if causal:
        pairs -= seqlen_q * (seqlen_q - 1) // 2
    flops = (10 if backward else 4) * batch * heads * pairs * head_dim
    q = batch * seqlen_q * heads * head_dim * dtype.itemsize
    k = batch * seqlen_k * kv_heads * head_dim * dtype.itemsize
    lse = batch * heads * seqlen_q * 4
    moved = 4 * q + 2 * k + 2 * k + lse if backward else 2 * q + 2 * k + lse
    return flops, moved
    ### END SOLUTION


def roof(flops, moved, tflops, gb_s):
    """(FLOPs a byte, least time in ms, "arithmetic" or "memory")."""
    ### BEGIN SOLUTION
    arithmetic, memory = flops / tflops / 1e9, moved / gb_s / 1e6
    by = "arithmetic" if arithmetic >= memory else "memory"
    return flops / moved, max(arithmetic, memory), by
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-4-1-cost-flops", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_cost_flops(attention_cost)
### BEGIN HIDDEN TESTS
checks.check_cost_flops(attention_cost, seed=11)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-1-cost-bytes", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
checks.check_cost_bytes(attention_cost)
### BEGIN HIDDEN TESTS
checks.check_cost_bytes(attention_cost, seed=12)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-1-cost-roof", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_roof(roof)
### BEGIN HIDDEN TESTS
checks.check_roof(roof, seed=13)
### END HIDDEN TESTS

# %% [markdown]
# An H200's specification promises 989.5 TFLOP/s and 4,800 GB/s. Divided: 206 FLOPs for each byte. This is its *ridge*. Below it a
# case is bound by memory. **Predict first**: how many of the eight `forms` below are?

# %%
predicted_memory_bound = None  # your guess, 0 to 8

# %%
own_cost = checks.solution_or_reference(
    attention_cost,
    checks.ex_4_1_cost.attention_cost,
    checks.check_cost_flops,
    checks.check_cost_bytes,
)
own_roof = checks.solution_or_reference(roof, checks.ex_4_1_cost.roof, checks.check_roof)
# prefill: a whole prompt in one pass; decode: a pass for the next token
#            batch, N_q,  N_k,    heads, kv_heads, d;  causal, backward
forms = {
    "prefill": ((4, 8192, 8192, 32, 32, 128), False, False),
    "prefill, causal": ((4, 8192, 8192, 32, 32, 128), True, False),
    "its backward": ((4, 8192, 8192, 32, 32, 128), True, True),
    "grouped, 8 key heads": ((4, 8192, 8192, 32, 8, 128), True, False),
    "many short texts": ((256, 128, 128, 32, 32, 128), True, False),
    "decode": ((4, 1, 8192, 32, 32, 128), True, False),
    "decode, 8 key heads": ((4, 1, 8192, 32, 8, 128), True, False),
    "decode, 8 tokens at once": ((4, 8, 8192, 32, 8, 128), True, False),
}
rows = {}
for name, (sizes, causal, backward) in forms.items():
    flops, moved = own_cost(*sizes, dtype=torch.bfloat16, causal=causal, backward=backward)
    intensity, least_ms, bound_by = own_roof(flops, moved, 989.5, 4800)
    rows[name] = [flops / 1e9, moved / 1e6, intensity, least_ms, bound_by]
columns = ["GFLOP", "MB", "FLOPs a byte", "least ms", "bound by"]
forms_table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
by_memory = int((forms_table["bound by"] == "memory").sum())
checks.compare_prediction("Bound by memory", predicted_memory_bound, by_memory, "of 8")

# %% tags=["nbval-check-output"]
digits = {"GFLOP": 1, "MB": 1, "FLOPs a byte": 1, "least ms": 4}
print(forms_table.round(digits).to_string())

# %% [markdown]
# Long texts are bound by *arithmetic*: the intensity grows with $N$. Short texts and decode steps are bound by memory: a single
# query does one FLOP for each byte that it reads, or 4 where four queries share a key.
#
# ### Your device
#
# No device reaches its specification, so the lab measures two ceilings: a copy of a large tensor, and a product of
# large matrices. FlashAttention moves each tensor once; the textbook's four operators pass $S$ and $P$ on through memory (notebook 1).

# %%
from labsupport.analysis.roofline import roofline
from labsupport.profiling import measured_ceilings
from labsupport.profiling.grids import make_inputs

ceilings = measured_ceilings()
dtype_name = str(dtype).removeprefix("torch.")
sizes = {"batch": batch, "heads": heads, "dtype": dtype_name}
lengths = [512, 2048, 8192] if gpu else [128, 512, 2048]  # some seconds
prefill = grid(["standard", "sdpa_flash"], lengths, **sizes)
decode = grid(["sdpa_flash"], [1], kv_seqlen=8192, kv_heads=[heads, heads // 4], **sizes)
measured = run_grid(prefill + decode, measure_error=False, max_seconds=0.2)
judged = roofline(measured[measured.status == "ok"], ceilings)


def bytes_between_operators(case):
    q, k, v, _ = make_inputs(case, torch.device(device), seed=0)
    seen = analysis.trace_tensors(lambda: attention(q, k, v, backend=case.backend))
    return seen.read_bytes + seen.written_bytes


passed_on = {
    case.seqlen: bytes_between_operators(case) for case in prefill if case.backend == "standard"
}
of_textbook = judged.backend == "standard"
judged.loc[of_textbook, "bytes"] = judged.seqlen.map(passed_on)
judged["intensity"] = judged.flops / judged.bytes

# %%
longest = judged[judged.seqlen > 1].groupby("backend").intensity.last()
plotting.plot_roofline(
    judged,
    [plotting.RoofLine("measured", ceilings.matmul_tflops[dtype_name], ceilings.copy_gb_s)],
    title=f"FlashAttention reaches {longest.sdpa_flash:.0f} FLOPs a byte, the textbook "
    f"{longest.standard:.0f}",
    small_print=f"{ceilings.device}, {dtype_name}, {heads} heads of {head_dim}; of each colour, "
    f"from left to right: {', '.join(map(str, lengths))} tokens (before them, two decode steps)",
)

# %% [markdown]
# The textbook's FLOPs and bytes both grow with $N^2$, so its intensity stays: $4 N^2 d / (6 N^2 b) = 2d / 3b$ for six passes over
# numbers of $b$ bytes, 10.7 in float32 with $d = 64$. (In float32 a decode step does half a FLOP for each byte.) FlashAttention moves to the right, far beyond the ridge. The
# *algorithm* decides how far right a point is, the *kernel* how close to the roof. (On a CPU a point may lie above
# the slope, since caches hold small cases.)
#
# ### The right share
#
# "A good kernel uses 80% of the bandwidth." NVIDIA's profiler measured three of this lab's kernels on an H200 (head_dim 128,
# N = 4096, batch 4, 16 heads; `data/runs/peers-h200/notes.md`):

# %% tags=["nbval-check-output"]
#                 ms, GB from HBM, TFLOP
seen_by_ncu = {
    "forward": (1.04, 0.262, 0.55),
    "backward, dK and dV": (1.74, 0.391, 1.10),
    "rows (row sums of dO * O)": (0.038, 0.139, 0.0),
}
# 4,200 GB/s and 790 TFLOP/s: ceilings measured on this H200, not the specification's
for name, (ms, gb, tflop) in seen_by_ncu.items():
    print(
        f"{name:26} {gb / ms * 1e3 / 4200:4.0%} of the bandwidth, "
        f"{tflop / ms * 1e3 / 790:4.0%} of the arithmetic"
    )

# %% [markdown]
# The forward uses 6% of the bandwidth and two thirds of the arithmetic, and that is good; row sums have almost nothing to
# compute. Ask what bounds a case, then look at the use of *that*.

# %% [markdown]
# ## 4.4 · Traffic, counted
#
# "Each tensor once" is the ideal: a program works on tiles, and reads some data several times. How often?
#
# ![A GPU: HBM, an L2 cache, 132 multiprocessors; border 1 is at the multiprocessors, 2 at L2, 3 at HBM.](../theory/figures/gpu.png)
#
# *Registers* and *shared memory* are a multiprocessor's fast memory, *HBM* is the slow one. The *L2* cache keeps what was read
# last. In a simple model, a fast memory holds $M$ numbers; `analysis.count` counts what passes (`version2` is
# FlashAttention-2):

# %% tags=["nbval-check-output"]
q1, k1, v1 = (torch.randn(256, 16, dtype=torch.float64) for _ in range(3))
print("256 tokens, head_dim 16, M = 2,400 numbers")
for name in ("standard", "version2"):
    counted = analysis.count(name, q1, k1, v1, block_q=32, block_k=16, capacity=2400)
    print(f"{name:10} moves {counted.total:9,} numbers, and holds up to {counted.peak:,}")

# %% [markdown]
# Some texts say that FlashAttention needs $O(N)$ memory accesses. **Predict first**: if the sequence gets twice as long,
# how much does its traffic grow?

# %%
predicted_growth = None  # your guess: times as much traffic

# %%
longer = [torch.randn(512, 16, dtype=torch.float64) for _ in range(3)]
doubled = analysis.count("version2", *longer, block_q=32, block_k=16, capacity=2400)
checks.compare_prediction(
    "Twice the length", predicted_growth, doubled.total / counted.total, "times"
)

# %% [markdown]
# ![Traffic against the size of the fast memory: FlashAttention's falls in proportion, the textbook's only up to a point.](../theory/figures/io-traffic.png)
#
# Not quite 4: $Q$ and $O$ pass only once. Only the extra *memory* is $O(N)$. For each block of queries all keys and values
# pass: the traffic *grows like* $N^2 d^2 / M$ (theorem 2 of the FlashAttention paper). The constant depends on the tiles.
# [Count what passes](further/counting.ipynb) derives it.
#
# On a GPU, $M$ belongs to *one* multiprocessor. NVIDIA's Nsight Compute counts bytes at borders 1 and 3 of the drawing (the
# lab's kernels, recorded on an H200):

# %% tags=["nbval-check-output"]
counters = load_run("traffic-h200").query("kernel != 'rows_kernel' and head_dim == 128")
gigabytes = counters[["counted", "moved", "compulsory", "dram"]] / 1e9
gigabytes.columns = ["tiles, GB", "1: multiprocessors", "tensors once", "3: HBM"]
names = counters.kernel.str.removeprefix("hopper_").str.removesuffix("_kernel")
labels = counters[["seqlen", "kv_heads"]].assign(kernel=names)
print(labels.join(gigabytes.round(2)).to_string(index=False))

# %% [markdown]
# (*keys* and *queries* are the backward's two kernels.) At the multiprocessors, our count of the tiles' bytes is exact.
# HBM delivers each tensor about once (up to 6% less, once 28% more): what is read again mostly fits into L2. The
# theorem counts border 1.

# %% [markdown]
# ## 4.5 · Enough programs?
#
# An H200 has 132 multiprocessors. FlashAttention's first version starts one program for each head of each sequence; version 2
# starts one for each block of 128 queries of each head. In a recorded run one sequence of 16,384 tokens has 1 to 16 heads.
# **Predict first**: how many times as long does version 1 take for 16 heads as for one?

# %%
predicted_factor = None  # your guess, times as long

# %%
orders = load_run("loop-orders-h200").query("head_dim == 64 and not causal and seqlen == 16384")
growths = [
    pd.DataFrame({"what": f"H200: version {n}, more heads", "work": orders.version1_programs,
                  "time": orders[f"version{n}_ms"] / orders[f"version{n}_ms"].iloc[0]})
    for n in (1, 2)
]  # fmt: skip
factors = [table.time.iloc[-1] for table in growths]
checks.compare_prediction("Version 1, 16 times the heads", predicted_factor, factors[0], "times")
short = 512 if gpu else 256
ways = {
    "here: longer sequence": grid(["sdpa_flash"], [short, 2 * short, 4 * short], **sizes),
    "here: larger batch": grid(["sdpa_flash"], [short], **sizes | {"batch": [1, 4, 16]}),
    "here: more heads": grid(["sdpa_flash"], [short], **sizes | {"heads": [4, 16, 64]}),
}
for what, cases in ways.items():
    timed = run_grid(cases, measure_error=False, max_seconds=0.2)
    work = np.array([case.flops() for case in cases])
    times = timed.median_ms / timed.median_ms.iloc[0]
    growths.append(pd.DataFrame({"what": what, "work": work / work[0], "time": times}))
growth = pd.concat(growths)
here = growth[growth.what.str.startswith("here")]
off = (here.time > 2 * here.work) | (not gpu and here.time < here.work / 2)
busy = " (a busy machine: where these lines leave the dotted one is noise)" if off.any() else ""
plotting.plot_growth(
    growth,
    title=f"On an H200, 16 times the heads take {factors[0]:.1f} times as long in version 1, "
    f"and {factors[1]:.0f} times in version 2",
    small_print=f"here: {ceilings.device}, {dtype_name}, from {short} tokens{busy}; "
    "H200: recorded, one sequence of 16,384 tokens, head_dim 64",
)

# %% [markdown]
# Version 1 takes nearly the same time for 16 times the work: 15 more multiprocessors join in, and 116 are still idle. *This* is
# why version 2 splits the queries. A head is 128 programs. Two on a multiprocessor take 1.5
# times as long as one; sixteen heads need eight such rounds: 12 times.
#
# To a kernel, batch and heads are the same: independent work. Once the device is full, time grows with the work, in
# steps: programs start in *waves* of as many as fit, and the last can cost as much as a full one. With many waves that is
# nearly in proportion.
#
# ![The share of slots at work is a saw-tooth; recorded times of a kernel lie on or under staircases of 132 or 264 programs a step.](../theory/figures/performance-waves.png)

# %% [markdown]
# ## 4.6 · Can it be predicted?
#
# A simple model has two numbers: the time $t_0$ that a call takes to start, and the rate at which it then works.
#
# $$t = t_0 + \frac{\text{FLOPs}}{\text{rate}}$$
#
# A good model predicts shapes that it *has not seen*. So some rows are *held out*: from a recorded run of cuDNN's kernel, we
# fit the lengths 512, 4,096 and 16,384, with the least *relative* errors, and predict the three between them.

# %% tags=["nbval-check-output"]
two_numbers = checks.ex_4_4_predict
cudnn = load_run("attention-h200").query("backend == 'sdpa_cudnn' and direction == 'forward'")
for causal, rows in cudnn.groupby("causal"):
    options = {"dtype": torch.bfloat16, "causal": causal, "backward": False}
    flops = np.array([own_cost(4, n, n, 16, 16, 64, **options)[0] for n in rows.seqlen])
    measured_ms = rows.median_ms.to_numpy()
    fitted = rows.seqlen.isin([512, 4096, 16_384]).to_numpy()
    start_ms, rate = two_numbers.fit_time(flops[fitted], measured_ms[fitted])
    predicted_ms = two_numbers.predict_time(flops, start_ms, rate)
    table = pd.DataFrame({"predicted, ms": predicted_ms, "measured, ms": measured_ms}).round(3)
    table["off by, %"] = (100 * (predicted_ms / measured_ms - 1)).round(1)
    print(f"causal={causal}: start {1e3 * start_ms:.0f} µs, then {rate:.0f} TFLOP/s")
    print(table.set_index(rows.seqlen)[~fitted].to_string(), end="\n\n")

# %% [markdown]
# The two numbers mean: a call costs 9 µs however short it is, and a full GPU then works at 470 TFLOP/s, about half of the
# specification. Without a mask they are off by at most 3%, with a causal mask by up to 10%: a tile on the diagonal is
# computed whole, and half of it is thrown away. That costs time in proportion to $N$, which neither number can express. The
# fitted rows, not printed, are off by about 1%.
#
# The lab's predictor has terms for that, and adds an interval that should contain 90% of measurements. (In [Predict and
# choose](further/predict-and-choose.ipynb) you write the fit and its test, as bonus exercise 4-4, and compare both models.)

# %%
predictor, _ = analysis.calibrate_run("attention-h200")
asked = Case("sdpa_cudnn", 6144, batch=4, heads=16, dtype="bfloat16", causal=True)
print(analysis.predict(asked, predictor))

# %% [markdown]
# ## 4.7 · Other hardware
#
# `transfer` applies the lab's predictor to a GPU that nobody measured, by its specification
# (`data/hardware.csv`). It assumes that a program reaches the same share of each GPU's ceilings. The assumption is rough:
# FlashAttention-2 reaches 50 to 73% of an A100's peak, and 35% of an H100's (papers of versions 2 and 3). At 73%, the
# case below would take 2.4 ms on an A100, left of its bar. So even the interval is an estimate.

# %%
from labsupport.profiling.hardware import read_specs

long = Case("sdpa_flash", 8192, batch=4, heads=16, dtype="bfloat16", causal=True)
specs = {spec.name: spec for spec in read_specs()}
rows = []
for name in ("H200", "H100 SXM", "B200", "A100 SXM 80 GB", "RTX 4090", "RTX 3090", "L4"):
    guess = analysis.predict(long, analysis.transfer(predictor, name))
    ridge = specs[name].peak_tflops("bfloat16") * 1e3 / specs[name].bandwidth_gb_s
    bound = roofline([long], specs[name]).bound_ms.iloc[0]
    rows.append([f"{name}, ridge {ridge:.0f}", guess.ms, guess.low_ms, guess.high_ms, bound])
elsewhere = pd.DataFrame(rows, columns=["device", "ms", "low_ms", "high_ms", "bound_ms"])
ran = load_run("attention-h200").query(
    "backend == 'sdpa_flash' and direction == 'forward' and causal and seqlen == 8192"
)
elsewhere.loc[0, "measured_ms"] = ran.median_ms.iloc[0]
l4 = elsewhere.iloc[-1]
plotting.plot_predictions(
    elsewhere,
    title=f"FlashAttention-2 on an L4 should take {l4.low_ms:.0f} to {l4.high_ms:.0f} ms, "
    f"on an H200 {elsewhere.low_ms[0]:.1f} to {elsewhere.high_ms[0]:.1f}",
    small_print="sdpa_flash, forward, causal, N = 8192, batch 4, 16 heads of 64, bfloat16. "
    "Calibrated on an H200 (this length was held out); nothing was measured on the others. "
    "Ridge: FLOPs a byte, by the specification",
)

# %% [markdown]
# To test a line, run `labsupport bench --seqlen 8192 --batch 4 --nheads 16 --headdim 64 --causal` on that GPU.

# %% [markdown]
# ## 4.8 · Which one to take
#
# Take the first row that you answer with yes ([chapter 10](../theory/10-field-guide.md#choose) has the reasons):
#
# ![Eleven questions about GPU, dtype, mask and task: the first yes names the implementation; else sdpa_flash or fa2.](../theory/figures/field-decision.png)
#
# And *how* to call it:
#
# | for | take |
# | --- | --- |
# | a few hundred tokens | larger batches or `torch.compile` |
# | dtype | bfloat16; float16 only where the range is known |
# | `head_dim` | 128 rather than 64 for speed, with a tuned kernel; kernels end at 256 |
# | a causal mask | `causal=True`, never a mask tensor: it hides what could be skipped |
# | decoding | grouped heads, and a kernel that splits the keys among programs |
# | block sizes | leave them to the library, or tune |

# %%
import torch.nn.functional as F

from labsupport.profiling import measure_ratio

by_heads_first = [x.transpose(1, 2) for x in (q, k, v)]
lower = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril()
ratio = measure_ratio(
    lambda: F.scaled_dot_product_attention(*by_heads_first, attn_mask=lower),
    lambda: F.scaled_dot_product_attention(*by_heads_first, is_causal=True),
    max_seconds=0.5,
)
print(f"Here, a causal mask as a tensor takes {ratio.median:.1f} times as long as is_causal=True.")

# %% tags=["nbval-check-output"]
peers = load_run("peers-h200").query("direction == 'forward' and not causal")
rate = peers.pivot(index=["backend", "seqlen"], columns="head_dim", values="tflops")
by_dim = (rate[128] / rate[64]).groupby("backend").median()
print("On an H200, as measured:")
print(f"head_dim 128 instead of 64: {by_dim.min():.1f} to {by_dim.max():.1f} times the FLOP rate")
decoded = load_run("decode-h200").query("batch == 1 and keys == 131072")
of_copy = decoded.set_index("implementation").of_copy
print(f"decoding, split among programs: {of_copy['sdpa_cudnn']:.0%} of a copy's bandwidth")
print(f"decoding with a prefill kernel: {of_copy['flash_triton']:.0%}")

# %% [markdown]
# **The usual traps**:
#
# - timing without `synchronize`, or with the first call in it (4.1);
# - FLOPs from a profiler that does not know the kernel (4.1);
# - judging a case by its bandwidth when arithmetic bounds it (4.3);
# - too few programs for the device (4.5);
# - testing a prediction on the rows that it was fitted to (4.6);
# - expecting a whole model to gain as much as attention (notebook 2, section 2.4);
# - believing that FlashAttention ran because its name was asked for (notebook 2).

# %% [markdown]
# ## 4.9 · A fault to find
#
# A colleague times calls with an empty cache, as a new request would find it: before each call a "refill" kernel overwrites the
# cache. "Our new kernel is four times as fast by NVIDIA's counters, and my benchmark says not even twice."
#
# `VirtualGpu` has a virtual clock: `launch` queues a kernel and returns after 0.01 ms, `synchronize` waits for the whole queue,
# `now` reads the program's clock. The first call is compiled. A call that finds its data in the cache takes half as long.
#
# ### Exercise 4-6 · Find the fault
# ●●○ · useful · 12 minutes · 4 points
#
# The next cell begins with the colleague's program. *First* run the table after it: for some calls it shows the GPU's true work
# and the time that the program measures, with 9 and with 99 repeats. Then name the cause and repair the program:
# `find_fault` ends with `return letter, median_ms` (a string and a function); your `median_ms` measures at most 0.01 ms (the
# launch) more than the call's work.
#
# | | the cause |
# | --- | --- |
# | `"a"` | the clock is read before the call is done |
# | `"b"` | the compiling of the first call is in the median |
# | `"c"` | the call finds its data in the cache |
# | `"d"` | other work is still running when the clock starts |
# | `"e"` | the program's launches take longer than the GPU's work |
# | `"f"` | other programs disturb |
#
# <details><summary>Hint 1: a nudge</summary>
#
# Subtract "one call works" from a measured column. What does the difference depend on?
#
# <details><summary>Hint 2: the idea</summary>
#
# Draw the GPU's line above the program's line for one round: when does each kernel run, and when is the clock read?
#
# <details><summary>Hint 3: an outline</summary>
#
# Only the second kernel of a round may run between the two readings of the clock. What must the program do before the first?
# </details>
# </details>
# </details>

# %% nbgrader={"grade": false, "grade_id": "ex-4-6-fault", "locked": false, "schema_version": 3, "solution": true, "task": false}
import statistics

from labsupport.checks.ex_4_6_clock import VirtualGpu
from labsupport.checks.causes import letter_and_program


def median_ms(gpu, repeats):
    """The median time of a call that finds the cache empty."""
    gpu.launch("call")  # compiles
    times = []
    for _ in range(repeats):
        gpu.launch("refill")
        start = gpu.now()
        gpu.launch("call")
        gpu.synchronize()
        times.append(gpu.now() - start)
    return statistics.median(times)


def find_fault():
    """The letter of the cause, and a `median_ms` without the fault."""

    ### BEGIN SOLUTION
    def repaired(gpu, repeats):
        gpu.launch("call")
        measured = []
        for _ in range(repeats):
            gpu.launch("refill")
            gpu.synchronize()
            before = gpu.now()
            gpu.launch("call")
            gpu.synchronize()
            measured.append(gpu.now() - before)
        return statistics.median(measured)

    return "d", repaired
    ### END SOLUTION


def after_repair(work_ms, refill_ms, compile_ms, repeats):
    """The letter, and what the repaired program measures on a virtual GPU."""
    letter, repaired = letter_and_program(find_fault())
    return letter, repaired(VirtualGpu(work_ms, refill_ms, compile_ms), repeats)


# %% tags=["nbval-check-output"]
pairs = [(work, refill) for refill in (0.0, 1.2) for work in (0.4, 1.6, 6.4)]
pd.DataFrame(
    {
        "refill, ms": [refill for _, refill in pairs],
        "one call works, ms": [work for work, _ in pairs],
        "9 repeats, ms": [f"{median_ms(VirtualGpu(*pair, 40), 9):.2f}" for pair in pairs],
        "99 repeats, ms": [f"{median_ms(VirtualGpu(*pair, 40), 99):.2f}" for pair in pairs],
    }
)

# %% nbgrader={"grade": true, "grade_id": "ex-4-6-fault-clock", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
checks.check_clock(after_repair)
### BEGIN HIDDEN TESTS
checks.check_clock(after_repair, seed=46)
### END HIDDEN TESTS

# %% [markdown]
# ## What you measured
#
# - Textbook attention spends much of its time on the softmax. A fused kernel's heart is a few lines; tiles, resources and
#   overlap decide its speed.
# - Long texts are bound by arithmetic, decode steps by bandwidth. Traffic grows like $N^2 d^2 / M$; HBM sees each tensor about once.
# - Two numbers predict cuDNN's times within 3%; a causal mask needs a third.
#
# ### Three questions
#
# <details><summary>1. A kernel's report says: bandwidth 12%, tensor cores 60%. A colleague wants to "improve memory access". What do you say?</summary>
#
# Ask what bounds the case: memory could deliver eight times as much, so it is arithmetic. The tensor cores are idle 40% of
# the time. They wait for exponentials and rescaling, so work on the overlap. </details>
#
# <details><summary>2. Somebody doubles head_dim and halves the number of heads. FLOPs, compulsory bytes, traffic to the multiprocessors: what changes?</summary>
#
# FLOPs and compulsory bytes stay (except $L$, which halves). A head's traffic, which grows like $N^2 d^2 / M$, quadruples: twice as much in all.
# Exponentials halve, so kernels often get *faster*. </details>
#
# <details><summary>3. A model of time was fitted on 20 shapes, and its mean error on them is 2%. What do you ask before you use it?</summary>
#
# Its error on shapes that it has not seen, and how those differ. And its interval: without one, no measurement can
# contradict the prediction. </details>
#
# ### Read on
#
# - Further notebooks: [predict and choose](further/predict-and-choose.ipynb), [reading a
#   profile](further/profiles.ipynb), [FlashAttention-4](further/flashattention-4.ipynb).
# - Williams, Waterman and Patterson, *Roofline* (2009), <https://doi.org/10.1145/1498765.1498785>.
# - Kernels to read: [chapter 10](../theory/10-field-guide.md#where-to-read-on).
#
# **The end of the lab.** You have written the algorithm, put it into a model, trained with it on long texts, and predicted
# its times.
#
# ### How far you are
#
# The checks run once more:

# %%
from labsupport.course.progress import show_progress

show_progress("04", globals())
