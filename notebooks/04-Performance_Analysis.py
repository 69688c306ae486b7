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
# ![Speed of the textbook's and of FlashAttention's kernels on an H200 against FLOPs per byte: the textbook lies far down the slope that the memory sets, the fused kernels near the roof of the arithmetic.](../theory/figures/roofline-h200.png)
#
# Every point is the same mathematics on the same GPU. By the end of this notebook you can draw this picture, explain
# what holds each point back, and predict the next one.
#
# **After this notebook you can**
#
# - find with a profiler where the time of a call goes, and know what the profiler does not show;
# - count FLOPs and bytes, place any case of attention under a roofline, and name what bounds it;
# - count the traffic between fast and slow memory, for any loop order and any tiles;
# - write a whole FlashAttention kernel in Triton;
# - predict a time, test the prediction on shapes that it has not seen, and apply it to another GPU with an interval;
# - choose an implementation for a workload, and give reasons.
#
# **Time** about 163 minutes, of which the exercises take 130. **You need** notebooks 1 and 2. A laptop is enough;
# figures of a large GPU come from recorded runs. Each section is marked *core* or *further (optional)*; the core fits
# an afternoon.
#
# **Theory**, before or after: chapters [4, IO complexity](../theory/04-io-complexity.md), [5, From version 1 to version
# 4](../theory/05-from-v1-to-v4.md) and [8, Performance model](../theory/08-performance-model.md). The
# [glossary](../theory/glossary.md) defines the terms.

# %%
import math
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import pandas as pd
import torch

from labsupport import analysis, checks, plotting
from labsupport.attention import attention, available_backends
from labsupport.profiling import Case, environment_card, grid, load_run, run_grid, speedup

torch.manual_seed(0)
environment_card()

# %%
gpu = torch.cuda.is_available()
device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
batch, heads, head_dim, seqlen = (4, 16, 64, 4096) if gpu else (1, 4, 64, 1024)


def random_qkv(seqlen, dtype=dtype):
    """q, k, v of shape (batch, seqlen, heads, head_dim)."""
    shape = (batch, seqlen, heads, head_dim)
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]


# %% [markdown]
# ## 4.1 · Where does the time go?
#
# *Core.* A stopwatch measures how long a call takes. A *profiler* shows which part took the time. PyTorch's profiler
# records each operator, and each kernel on a GPU: its time, its calls, the memory it allocates. The lab's `trace` runs
# a call under it and returns tables.
#
# Textbook attention is two matrix products and a softmax, and nearly all of its FLOPs are in the products. **Predict
# first**: what share of its *time* do they take?

# %%
predicted_share = None  # your guess, a number between 0 and 1

# %%
from labsupport.profiling.trace import trace

q, k, v = random_qkv(seqlen)


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
products = table[table.operator.isin(["aten::bmm", "aten::mm"])]
checks.compare_prediction("Share of the matrix products", predicted_share, products.share.sum())


def shown(trace, rows=4):
    """The longest rows, with units; FLOPs and bytes where the profiler knows them."""
    table = trace.kernels().head(rows)
    table = table.assign(name=table.name.str[:55], MiB=table.bytes / 2**20, GFLOP=table.flops / 1e9)
    return table[["name", "calls", "device_ms", "share", "GFLOP", "MiB"]].round(2)


shown(traces["standard"])

# %% [markdown]
# The rest is mainly the softmax, which has hardly any FLOPs. On a GPU its time goes to reading and writing $N \times N$
# numbers. On a CPU it also goes to exponentials and to memory that is used for the first time (compare `mul_`, which
# moves as many bytes as the softmax). A row is an operator on a CPU and a kernel on a GPU. `device_ms` is the time the
# device spent on that row, without the operators that it calls. (PyTorch's own table calls this column
# `self_device_time_total`. Older texts say `cuda_time_total`: `sort_by` still accepts that name, but averages no longer
# have it as an attribute.) `MiB` counts the tensors that an operator reads and writes. Now FlashAttention:

# %%
for name, seen in traces.items():
    print(
        f"{name:10} {seen.wall_ms:6.1f} ms under the profiler, peak {seen.peak_bytes / 2**20:6.1f} MiB"
    )
shown(traces["sdpa_flash"])

# %% [markdown]
# There is one row: an operator profiler cannot see inside a fused kernel. The hardware's maker has tools for that
# (Nsight Compute, on NVIDIA's GPUs). We *count* instead, in section 4.3.
#
# ### Four traps
#
# **FLOPs of fused kernels.** The profiler counts the FLOPs of a few operators only, mainly matrix products. PyTorch has
# a second counter, `FlopCounterMode`. Compare both with the true number, $4 N^2 d$ for each head:

# %%
from torch.utils.flop_counter import FlopCounterMode

true = 4 * batch * heads * seqlen**2 * head_dim / 1e9
for name, call in {"standard": textbook, "sdpa_flash": flash}.items():
    with FlopCounterMode(display=False) as counter:
        call()
    profiler, other = traces[name].kernels().flops.sum() / 1e9, counter.get_total_flops() / 1e9
    print(f"{name:10} profiler {profiler:.2f}, counter {other:.2f}, true {true:.2f} GFLOP")

# %% [markdown]
# On a CPU both report 0 for the fused kernel, so a FLOP rate computed from them is 0. (On a GPU the counter knows the
# kernel, but counts a causal mask as if there were none.) So count by formula: exercise 4-1.
#
# **The first call.** It pays for work that happens only once: choosing, loading or compiling a kernel, starting
# threads, allocating workspaces. These are the first seven calls of textbook attention in this notebook, timed above:

# %%
print("ms:", " ".join(f"{ms:.2f}" for ms in first_calls))

# %% [markdown]
# The cost of the first call depends on the kernel. On a CPU it may be small. On an H200 this lab's own Triton kernels
# take 0.6 to 2.2 s when the compiler's cache is empty (`data/runs/peers-h200/notes.md`). Later calls vary too, so
# `measure_time` warms up, repeats, and reports a median. One call, timed repeatedly while other programs started and
# stopped:
#
# ![Recorded times of one unchanged call during 14 minutes on a busy machine: they fall by a quarter, while the time relative to a reference, measured in turns, changes far less.](../theory/figures/performance-noise.png)
#
# **A clock that does not wait.** A GPU works while Python goes on. If you read the clock right after the call, you
# measure the *launch*: the time in which Python hands a kernel to the GPU. Call `torch.cuda.synchronize()` before each
# reading, as `milliseconds` above does, to wait for the work. Both ways:

# %%
start = perf_counter()
flash()
without = 1e3 * (perf_counter() - start)
if gpu:
    torch.cuda.synchronize()
print(f"without waiting {without:.3f} ms, with {milliseconds(flash):.3f} ms")

# %% [markdown]
# On a CPU the two differ by noise only, because the call returns when the work is done. On a GPU the first number is
# the time of a launch, nearly the same for any length. Many reports of a "thousandfold speed-up" made this mistake.
#
# **A busy GPU is not a well-used one.** `nvidia-smi` shows a *utilisation* of 100% if some kernel ran all the time,
# even a kernel with a single thread. It says nothing about how much of the hardware that kernel used.
#
# ### A whole step
#
# Now a training step (forward, backward, AdamW) of the small decoder of notebook 3. The rows are attention, the layers'
# matrix products, and the rest.

# %%
from labsupport.training import DecoderConfig, MemoryOptions
from labsupport.training.measure import MemoryStrategy
from labsupport.training.measure import training_step

tiny = DecoderConfig.preset("tiny")
tokens = 8192 if gpu else 1024
half_precision = torch.bfloat16 if gpu else None  # autocast


def kind(row):
    # The textbook's two products are batched ones, of all heads; layers have plain ones.
    if any(word in row.operator for word in ("attention", "softmax", "bmm", "masked_fill")):
        return "attention"
    return "layers' products" if "mm" in row.operator else "all the rest"


steps = {}
for name, backend in {"standard": "standard", "flash": "auto"}.items():
    strategy = MemoryStrategy(name, MemoryOptions(attention=backend), autocast=half_precision)
    step = training_step(tiny, strategy, tokens, torch.device(device))
    tries = [trace(step.run, count_bytes=False) for _ in range(3)]
    steps[name] = min(tries, key=lambda seen: seen.wall_ms)  # the one that was disturbed least
by_kind = {
    name: (rows := seen.kernels()).groupby(rows.apply(kind, axis=1)).device_ms.sum()
    for name, seen in steps.items()
}
pd.DataFrame(by_kind).rename_axis("device_ms of").round(1)

# %% [markdown]
# On a quiet machine the step with FlashAttention is shorter, and the parts outside attention take a larger share:
# Amdahl's law of notebook 2. (If your table differs, another program was using the cores: run the cell again.) *All the
# rest* shrinks too, because in the textbook's step it includes scaling, masking and copying of $N \times N$ numbers.
# The profiler cannot assign these operators to attention.
#
# A table does not show the order of events. The *timeline* does: save it, open <https://ui.perfetto.dev> in a browser,
# and drag the file there. (The file is read on your machine and not sent anywhere.) Look for gaps on the GPU's line:
# there the GPU waited for Python.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = steps["flash"].save(Path(folder) / "step.json.gz")
    print(f"{path.name}: {path.stat().st_size / 2**10:.0f} KiB")


# %% [markdown]
# `labsupport profile` does all this with one command, for one shape of attention. It writes a folder; read its
# `SUMMARY.md` first. If NVIDIA's profilers are installed, it runs them too.

# %% [markdown]
# ## 4.2 · FLOPs, bytes, and a roof
#
# *Core.* How fast *could* a call be? Its arithmetic takes at least FLOPs / (FLOPs a second). Moving its tensors takes
# at least bytes / (bytes a second). If the two overlap perfectly, the longer one is the time of the call. The
# *intensity*, FLOPs for each byte, says which one is longer. FLOPs alone do not: FlashAttention has one matrix product
# more than the textbook.
#
# ![Left: matrix products, the textbook 2 forward and 4 backward, FlashAttention 2 and 5. Right: time on an H200 at 16,384 tokens, the textbook 166 ms, three fused kernels between 29 and 51 ms](../theory/figures/products-and-time.png)

# %% [markdown]
# ### Exercise 4-1 · What a pass costs
# ●●○ · 15 minutes · 4 points
#
# | function | returns |
# | --- | --- |
# | `attention_cost(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, *, dtype, causal, backward)` | `(flops, moved)` |
# | `roof(flops, moved, tflops, gb_s)` | `(intensity, least_ms, bound_by)` |
#
# One pass: the forward, or with `backward=True` the backward alone. `seqlen_q <= seqlen_k`; a causal mask is aligned bottom-right.
#
# - `flops`: a multiply-add is 2. Only matrix products count, and of them only visible pairs. The backward computes $S$ again, so it
#   has five products.
# - `moved`: bytes, each tensor once. Forward: $Q, K, V$ in; $O$ and $L$ out. Backward: $Q, K, V, O, dO, L$ in; $dQ, dK, dV$ out.
#   $K$, $V$ and their gradients have `kv_heads` heads. $L$, the log-sum-exp, has one float32 for each query of each head. All else
#   is of `dtype`, a `torch.dtype` (`dtype.itemsize` bytes).
# - `intensity`: FLOPs a byte. `least_ms`: of a pass whose arithmetic (`tflops`, $10^{12}$ a second) and transfers (`gb_s`, $10^9$
#   bytes a second) overlap perfectly. `bound_by`: `"arithmetic"` or `"memory"`, whichever takes longer.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Draw the mask for 3 queries and 5 keys, the last query seeing all five keys. How many pairs does it hide? And which tensors does a
# backward pass read, and which does it write?
#
# <details><summary>Hint 2: the idea</summary>
#
# Bottom-right: the last query sees all keys, the one before it one less, and so on. So the mask takes away $0 + 1 + \dots + (N_q - 1)$
# pairs. Write $Q$'s bytes and $K$'s bytes down once, and count how often each appears: $O$, $dO$ and $dQ$ are as large as $Q$.
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


# %% nbgrader={"grade": true, "grade_id": "ex-4-1-cost-flops", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_cost_flops(attention_cost)
### BEGIN HIDDEN TESTS
checks.check_cost_flops(attention_cost, seed=11)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-1-cost-bytes", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_cost_bytes(attention_cost)
### BEGIN HIDDEN TESTS
checks.check_cost_bytes(attention_cost, seed=12)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-1-cost-roof", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_roof(roof)
### BEGIN HIDDEN TESTS
checks.check_roof(roof, seed=13)
### END HIDDEN TESTS

# %% [markdown]
# An H200's specification promises 989.5 TFLOP/s in bfloat16 and 4,800 GB/s: 206 FLOPs in the time of one byte, the *ridge*. Eight
# cases. **Predict first**: which of them are bound by memory?

# %%
predicted_memory_bound = None  # your guess: how many of the eight

# %%
own_cost = checks.solution_or_reference(
    attention_cost,
    checks.ex_4_1_cost.attention_cost,
    checks.check_cost_flops,
    checks.check_cost_bytes,
)
own_roof = checks.solution_or_reference(roof, checks.ex_4_1_cost.roof, checks.check_roof)
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
for name, (shape, causal, backward) in forms.items():
    flops, moved = own_cost(*shape, dtype=torch.bfloat16, causal=causal, backward=backward)
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
# ![Recorded on an H200: decode steps lie on the slope of the roof, prefills far to the right, below its flat part.](../theory/figures/performance-roofline.png)
#
# FlashAttention over a long text is bound by *arithmetic*, forward and backward: intensity grows with $N$. (The backward has 2.5 times
# the FLOPs of the forward: five products for two.) What is bound by memory: short texts, and a decode step, whatever the length of its
# cache. Its single query does one FLOP for each byte it reads, and 4 with grouped heads: four queries share a key. Several
# tokens per step, as in speculative decoding, multiply the intensity.
#
# A window takes FLOPs away, but no bytes. The lab's `roofline` knows it, and gives least time and bound of any `Case`, of the lab's
# recorded runs as well:

# %% tags=["nbval-check-output"]
from labsupport.analysis.roofline import Roof, roofline
from labsupport.profiling.hardware import find_spec

h200 = find_spec("NVIDIA H200")
text = Case("", 8192, batch=4, heads=32, head_dim=128, dtype="bfloat16", causal=True)
for left in (-1, 1023, 127):
    judged = roofline([text], h200, window_size=(left, 0)).iloc[0]
    print(
        f"window {left + 1 or 'none':>5}: {judged.intensity:6.0f} FLOPs a byte, {judged.bound_by}"
    )

# %% [markdown]
# ### Your device
#
# No device reaches its specification, so the lab measures two ceilings: a copy of a large tensor, and a product of
# large matrices. The plot shows the textbook, FlashAttention, and decode steps (one query, 8,192 keys) below them. The
# textbook's operators pass $S$ and $P$ to one another through memory. So *its* intensity uses the bytes that
# `trace_tensors` sees at its operators; the others count each tensor once:
#
# ![Textbook attention as four kernels, QKᵀ, scale, softmax and PV, above slow memory. Six numbered arrows pass over N x N numbers: S is written, read, written scaled, read; P is written, read. Beside it FlashAttention, one kernel, which reads Q, K and V and writes O.](../theory/figures/textbook-passes.png)
#
# **Predict first**: how many FLOPs a byte does the textbook need for large $N$? ($4 N^2 d$ FLOPs; a number has 4 bytes
# on a CPU, 2 on a GPU.)

# %%
predicted_intensity = None  # your guess, a number

# %%
from labsupport.profiling import measured_ceilings
from labsupport.profiling.grids import make_inputs

ceilings = measured_ceilings()
name_of_dtype = str(dtype).removeprefix("torch.")
shape = {"batch": batch, "heads": heads, "dtype": name_of_dtype}
lengths = [512, 2048, 8192] if gpu else [128, 512, 2048]  # some seconds
prefill = grid(["standard", "sdpa_flash"], lengths, **shape)
decode = grid(["sdpa_flash"], [1], kv_seqlen=8192, kv_heads=[heads, heads // 4], **shape)
measured = run_grid(prefill + decode, measure_error=False, max_seconds=0.2)
judged = roofline(measured[measured.status == "ok"], ceilings)


def bytes_between_operators(case):
    q, k, v, _ = make_inputs(case, torch.device(device), seed=0)
    seen = analysis.trace_tensors(lambda: attention(q, k, v, backend=case.backend))
    return seen.read_bytes + seen.written_bytes


own = {case.seqlen: bytes_between_operators(case) for case in prefill if case.backend == "standard"}
is_standard = judged.backend == "standard"
judged.loc[is_standard, "bytes"] = judged.seqlen.map(own)
judged["intensity"] = judged.flops / judged.bytes
longest = judged[is_standard].intensity.iloc[-1]
checks.compare_prediction("The textbook's FLOPs a byte", predicted_intensity, longest)
judged["GFLOP/s"] = 1e3 * judged.tflops
judged["MiB"] = judged.bytes / 2**20
names = ["backend", "seqlen", "kv_seqlen", "kv_heads", "MiB", "intensity", "GFLOP/s"]
judged[names].round({"MiB": 1, "intensity": 1, "GFLOP/s": 1})

# %%
peak = ceilings.matmul_tflops[name_of_dtype]
lines = [plotting.RoofLine("measured", peak, ceilings.copy_gb_s)]
spec = find_spec(ceilings.device)
if spec is not None:
    lines.insert(
        0, plotting.RoofLine("specified", spec.peak_tflops(name_of_dtype), spec.bandwidth_gb_s)
    )
grown = (
    judged[judged.seqlen > 1].groupby("backend").intensity.agg(lambda x: x.iloc[-1] / x.iloc[-2])
)
plotting.plot_roofline(
    judged,
    lines,
    title=f"From {lengths[-2]:,} to {lengths[-1]:,} tokens the textbook's intensity grows "
    f"{grown.standard:.1f} times, FlashAttention's {grown.sdpa_flash:.1f} times",
    small_print=f"{ceilings.device}, {name_of_dtype}, {heads} heads of {head_dim}; "
    "sdpa_flash, the two on the left: decode steps",
)

# %% [markdown]
# The textbook's intensity hardly depends on the length, because FLOPs and bytes both grow with $N^2$. Six passes over
# $N^2$ numbers of $b$ bytes give $4 N^2 d / (6 N^2 b) = 2d / 3b$: 10.7 in float32, for $d = 64$. (Four passes, without
# a kernel for the scale, would give 16.) FlashAttention moves to the right, under the flat part of the roof. A marker's
# height relative to the roof shows how good the *kernel* is; its position from left to right shows what the *algorithm*
# needs. Decode steps lie far below the slope. They *could* be bound by memory, but this kernel is made for many
# queries, and a decode step has one. (On a CPU the picture is less clear. Its caches hold small cases whole, so a
# marker may even lie above the slope. Exponentials, which the roof ignores, are slow there.) `labsupport bench` prints
# the share of the roof that a call reaches, with a verdict.
#
# ### Recorded: an H200
#
# `attention-h200` without a mask, 16 heads of 64, and `decode-h200`, 32 query heads on 8 key heads of 128:

# %%
recorded = load_run("attention-h200")
forward = recorded[(recorded.direction == "forward") & (recorded.status == "ok")]
some = forward[
    ~forward.causal & forward.backend.isin(["standard", "sdpa_flash", "sdpa_cudnn", "fa4"])
]
steps_recorded = load_run("decode-h200").query("implementation == 'sdpa_cudnn'")
cached = [
    Case("sdpa_cudnn", 1, kv_seqlen=row["keys"], batch=row.batch, heads=32, kv_heads=8,
         head_dim=128, dtype="bfloat16")
    for _, row in steps_recorded.iterrows()
]  # fmt: skip
judged_decode = roofline(cached, h200)
judged_decode["tflops"] = judged_decode.flops / steps_recorded.median_ms.to_numpy() / 1e9
on_h200 = pd.concat([roofline(some, h200), judged_decode])
judged_decode["of_slope"] = (
    judged_decode.tflops * 1e3 / judged_decode.intensity / h200.bandwidth_gb_s
)
fused = some[(some.backend != "standard") & (some.seqlen == some.seqlen.max())]
fastest = roofline(fused, h200).of_bound
is_textbook = on_h200.backend == "standard"  # S and P, each written once and read once, 2 bytes
squares = 4 * 2 * on_h200.batch * on_h200.heads * on_h200.seqlen * on_h200.kv_seqlen
on_h200["intensity"] = on_h200.flops / (on_h200.bytes + squares.where(is_textbook, 0))
ceiling = load_run("h200-prefill").attrs["provenance"]
plotting.plot_roofline(
    on_h200,
    [
        plotting.RoofLine("specified", h200.peak_tflops("bfloat16"), h200.bandwidth_gb_s),
        plotting.RoofLine("measured", ceiling["matmul_tflops"]["bfloat16"], ceiling["copy_gb_s"]),
    ],
    title=f"Decode steps reach {judged_decode.of_slope.max():.0%} of the bandwidth; "
    f"the longest prefills {fastest.min():.0%} to {fastest.max():.0%} of the arithmetic",
    small_print="recorded: NVIDIA H200, bfloat16, forward; lengths 512 to 16,384; "
    "far to the left decode steps, caches\n"
    "of 32,768 to 524,288 keys. standard: with at least four passes over N x N numbers, by formula",
)

# %% [markdown]
# ### A wrong rule
#
# "A good kernel uses more than 80% of the memory's bandwidth." Is that true of every kernel? NVIDIA's profiler measured
# three of this lab's Triton kernels on that GPU (head_dim 128, N = 4096, batch 4, 16 heads; bytes of HBM and times from
# `data/runs/peers-h200/notes.md`):

# %% tags=["nbval-check-output"]
#                 ms, GB from HBM, TFLOP
seen_by_ncu = {
    "forward": (1.04, 0.262, 0.55),
    "backward, dK and dV": (1.74, 0.391, 1.10),
    "rows (row sums of dO * O)": (0.038, 0.139, 0.0),
}
for name, (ms, gb, tflop) in seen_by_ncu.items():
    print(
        f"{name:26} {gb / ms * 1e3 / 4200:4.0%} of the bandwidth, "
        f"{tflop / ms * 1e3 / 790:4.0%} of the arithmetic"
    )


# %% [markdown]
# For a prefill kernel, high bandwidth use is a bad sign: it moves too much data. The forward uses 6% of the bandwidth
# and two thirds of the arithmetic. The kernel of row sums uses 87%, as it should: it has almost nothing to compute. So
# first ask what bounds a case, then look at the use of *that*: the tensor cores for a long prefill, the bandwidth for a
# decode step.

# %% [markdown]
# ## 4.3 · Between fast and slow memory
#
# *Core.* This drawing shows a GPU's memories and their names:
#
# ![A GPU from left to right: HBM with 140 GiB; an L2 cache with 60 MiB; 132 multiprocessors, each with 228 KiB of shared memory, 256 KiB of registers, and tensor cores. Three borders are marked: 1, to the multiprocessors; 2, at L2; 3, at HBM.](../theory/figures/gpu.png)
#
# A *multiprocessor* (SM) computes; its *tensor cores* multiply small tiles. Its *registers* and its *shared memory* are
# the fast memory, and hold what it computes with. *HBM* is the large, slow memory. The *L2* cache between them keeps
# what was read last. A kernel runs as many *programs*, each with its own tiles; one or more programs share a
# multiprocessor. (A CPU's caches play the same roles.)
#
# "Each tensor once" is a lower bound. A kernel works on tiles and reads some data several times. How often? Our model
# has a fast memory of $M$ numbers, where all computing happens, and a slow memory for everything else. We count each
# number that moves between them.

# %% [markdown]
# ### Exercise 4-2 · Count what passes
# ●●○ · 20 minutes · 4 points
#
# One head of `seqlen` queries and as many keys, forward; blocks divide `seqlen`. Count *numbers* (elements), not bytes.
#
# | function | returns |
# | --- | --- |
# | `textbook_traffic(seqlen, head_dim, block_q)` | `(read, written)` |
# | `tiled_traffic(seqlen, head_dim, block_q, block_k, *, outside, causal=False)` | `(read, written)` |
#
# ![Version 1: a block of keys stays, the blocks of queries pass, and O, m and l are read and written each time. Version 2: a block of queries stays, the keys pass, and O is written once.](../theory/figures/versions-orders.png)
#
# **Textbook**: three kernels, no mask.
#
# 1. $S = QK^\top$: a block of `block_q` rows of $Q$ stays while all of $K$ passes; then the next block. $S$ is written.
# 2. Softmax: reads $S$ row by row (a row fits), and writes $P$.
# 3. $O = PV$: for each block of rows of $O$, its rows of $P$ pass once, and all of $V$ passes. $O$ is written.
#
# **Tiled**, `outside="queries"` (FlashAttention-2): for each block of queries, $Q$ is read once, $K$ and $V$ pass block by block,
# then $O$ and $L$ are written. $L$ has one number a row.
#
# **Tiled**, `outside="keys"` (FlashAttention's first version): first, zeros are written to $O$, $m$ and $\ell$. Then
# for each block of keys, $K$ and $V$ are read once; for each block of queries, $Q, O, m, \ell$ are read and
# $O, m, \ell$ written. $m$ and $\ell$ have one number a row.
#
# With `causal=True`, skip a tile without a visible pair: nothing moves for it.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Take 4 tokens with blocks of 2, and write down every load and store of one head, in order. What moves once for each
# block? What moves for each tile?
#
# <details><summary>Hint 2: the idea</summary>
#
# Count the tiles, then what moves for each. With a causal mask, block $r$ of the queries ends with row `(r + 1) * block_q - 1`, which
# sees `(r + 1) * block_q` keys: how many blocks of `block_k` is that, when the last one may be cut?
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# textbook    read     Q once, K once for each block of rows;  S;  P once, V once for each block of rows
#             written  S, P, O
# queries     read     Q once, and K and V of each tile           written   O and L once
# keys        read     K and V once, and Q, O, m, l of each tile  written   zeros first, then O, m, l of each tile
# causal      tiles    the sum over the blocks of queries of ceil(keys that its last row sees / block_k)
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-2-traffic", "locked": false, "schema_version": 3, "solution": true, "task": false}
def textbook_traffic(seqlen, head_dim, block_q):
    """(read, written) numbers of textbook attention, one head."""
    ### BEGIN SOLUTION
    square, matrix, passes = seqlen**2, seqlen * head_dim, seqlen // block_q
    read = (matrix + passes * matrix) + square + (square + passes * matrix)
    written = square + square + matrix
    return read, written
    ### END SOLUTION


def tiled_traffic(seqlen, head_dim, block_q, block_k, *, outside, causal=False):
    """(read, written) numbers of FlashAttention, one head; outside: "queries" or "keys"."""
    ### BEGIN SOLUTION
    tiles = (seqlen // block_q) * (seqlen // block_k)
    if causal:
        tiles = sum(math.ceil(end / block_k) for end in range(block_q, seqlen + 1, block_q))
    matrix, rows, cols = seqlen * head_dim, block_q * head_dim, block_k * head_dim
    if outside == "queries":
        read = matrix + tiles * 2 * cols
        written = matrix + seqlen
    else:
        read = 2 * matrix + tiles * (2 * rows + 2 * block_q)
        written = (matrix + 2 * seqlen) + tiles * (rows + 2 * block_q)
    return read, written
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-4-2-traffic-textbook", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_textbook_traffic(textbook_traffic)
### BEGIN HIDDEN TESTS
checks.check_textbook_traffic(textbook_traffic, seed=21)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-2-traffic-tiled", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_tiled_traffic(tiled_traffic)
### BEGIN HIDDEN TESTS
checks.check_tiled_traffic(tiled_traffic, seed=22)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-2-traffic-causal", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_tiled_causal(tiled_traffic)
### BEGIN HIDDEN TESTS
checks.check_tiled_causal(tiled_traffic, seed=23)
### END HIDDEN TESTS

# %% [markdown]
# Now test your formulas. `analysis.count` *runs* an algorithm on real numbers, in a memory that refuses more than $M$
# numbers at a time, and counts everything that is loaded or stored. It is compared with your formula for the textbook,
# for version 1 (keys outside) and for version 2 (queries outside):

# %%
own_textbook = checks.solution_or_reference(
    textbook_traffic, checks.ex_4_2_traffic.textbook_traffic, checks.check_textbook_traffic
)
own_tiled = checks.solution_or_reference(
    tiled_traffic,
    checks.ex_4_2_traffic.tiled_traffic,
    checks.check_tiled_traffic,
    checks.check_tiled_causal,
)

# %% tags=["nbval-check-output"]
q1, k1, v1 = (torch.randn(128, 16, dtype=torch.float64) for _ in range(3))
outside = {"version1": "keys", "version2": "queries"}
print("              counted  formula    held, of 2,200")
for name in ("standard", "version1", "version2"):
    run = analysis.count(name, q1, k1, v1, block_q=16, block_k=32, capacity=2200)
    formula = (
        own_textbook(128, 16, 16)
        if name == "standard"
        else own_tiled(128, 16, 16, 32, outside=outside[name])
    )
    print(f"{name:10} {run.total:10,} {sum(formula):8,} {run.peak:9,}")

# %% [markdown]
# What if the tiles are larger than the memory?

# %% tags=["nbval-check-output"]
from labsupport.analysis.traffic import OutOfFastMemoryError

try:
    analysis.count("version2", q1, k1, v1, block_q=64, block_k=32, capacity=2200)
except OutOfFastMemoryError as error:
    print(error)

# %% [markdown]
# ### The law
#
# Some texts say that FlashAttention needs $O(N)$ memory *accesses*, but only its extra memory is $O(N)$. How do the
# accesses grow with the length, the head dimension, and the fast memory? First the fast memory:
#
# ![Numbers moved for each entry of S against the size of the fast memory: both versions of FlashAttention fall in proportion, the textbook only up to a point.](../theory/figures/io-traffic.png)
#
# **Predict first**: how much does the traffic grow if the sequence gets twice as long and the memory stays the same?

# %%
predicted_growth = None  # your guess: times as much traffic

# %% tags=["nbval-check-output"]
from labsupport.analysis.traffic import fitting_blocks


def accesses(version, seqlen, head_dim, capacity):
    """Numbers that pass, with the best blocks for this memory; what is left over is rounded up."""
    block_q, block_k = fitting_blocks(version, "forward", capacity, head_dim, power_of_two=True)
    return sum(own_tiled(seqlen, head_dim, block_q, block_k, outside=outside[version]))


def power(values, counts):
    return np.polyfit(np.log(values), np.log(counts), 1)[0]


lengths_n, dims, memories = (
    [2**i for i in (14, 15, 16)],
    [16, 32, 64],
    [2**i for i in range(14, 19)],
)
for version in outside:
    along_n = power(lengths_n, [accesses(version, n, 64, 2**17) for n in lengths_n])
    along_d = power(dims, [accesses(version, 2**18, d, 2**18) for d in dims])
    along_m = power(memories, [accesses(version, 2**20, 16, m) for m in memories])
    print(f"{version}: N to the power of {along_n:.2f}, d of {along_d:.2f}, M of {along_m:.2f}")

# %%
growth = accesses("version2", 2**16, 64, 2**17) / accesses("version2", 2**15, 64, 2**17)
checks.compare_prediction("Twice the length", predicted_growth, growth, "times")

# %% [markdown]
# So the traffic is $N^2 d^2 / M$: theorem 2 of the FlashAttention paper. It is *quadratic* in the length, as for the
# textbook. The gain is a large constant factor, about $M / d^2$. (The powers are not whole numbers, because blocks are
# powers of two here, and because $Q$ and $O$ pass once for any tiles. Theory chapter 4 derives the law with its
# constants.) Doubling `head_dim` costs four times the traffic, so large heads gain least.
#
# Version 2 (queries outside) moves less than version 1 at the same $M$, each with its best blocks, because $O$ stays in
# fast memory until it is done. (In the counts above, the blocks of 16 by 32 favoured version 1.) But this was not the
# main reason for version 2: section 4.5 shows that one.
#
# ### What a GPU's counters see
#
# $M$ is the memory of *one* multiprocessor. On a GPU most of the data that enters it comes from the L2 cache (60 MiB on
# an H200), not from HBM. NVIDIA's Nsight Compute counts bytes at the three borders of the drawing, here for three
# shapes and three kernels each (a recorded run). **Predict first**: at border 1, to
# the multiprocessors, by how many percent does the count of the tiles' bytes differ from the hardware's?

# %%
predicted_gap = None  # your guess, in percent

# %% tags=["nbval-check-output"]
counters = load_run("traffic-h200").query("kernel != 'rows_kernel'")
gap = 100 * (counters.moved_ratio - 1).abs().max()
print(f"you predicted {predicted_gap}; the largest difference is {gap:.4f}%")
gigabytes = counters[["counted", "moved", "l2", "compulsory", "dram"]] / 1e9
gigabytes.columns = ["tiles, GB", "1 to the SMs", "2 at L2", "tensors once", "3 at HBM"]
names = counters.kernel.str.removeprefix("hopper_").str.removesuffix("_kernel")
shapes = counters[["seqlen", "head_dim", "kv_heads", "causal"]].assign(kernel=names)
print(shapes.join(gigabytes.round(2)).to_string(index=False))

# %% [markdown]
# ![Bytes of three kernels at three borders, counted and read by Nsight Compute: equal at the multiprocessors, less at L2, far less at the memory.](../theory/figures/io-borders.png)
#
# The count is exact to the byte: the hardware moves what the theorem describes and what you counted by hand. Less data
# usually crosses the next border, because requests for the same block are joined on their way to L2. (With `head_dim`
# 64 the backward pass has 6% *more* there, and we do not know why.) HBM delivers each tensor about once, at most 1.28
# times here (with grouped heads), because K and V of the active heads fit into L2. So the roofline of section 4.2, with
# each tensor once, is right for HBM. The theorem counts the border in front of it.
#
# ### The largest tensor
#
# You can ask one question of any program with a single call: which is the largest tensor that it makes?

# %%
here = [one.name for one in available_backends(q, k, v) if one.runs]
programs = {
    name: partial(attention, q, k, v, backend=name)
    for name in ("standard", "flash_torch", "sdpa_flash")
    if name in here
}
programs["training step"] = step.run
for name, program in programs.items():
    seen = analysis.trace_tensors(program)
    print(f"{name:14} {seen.nbytes / 2**20:6.1f} MiB, shape {tuple(seen.shape)}, by {seen.op}")

# %% [markdown]
# For textbook attention it is $N \times N$ for each head. FlashAttention has nothing larger than its output, or than a
# tile of all heads (`flash_torch`, in plain PyTorch). No allocator or cache can distort this count, so the lab's tests
# use it.
#
# ### Tiles to play with
#
# Which tiles are best? Take one head of 4,096 tokens with $d = 64$ in bfloat16, and the shared memory of an H100's or
# H200's multiprocessor: 228 KiB, of which a single program may use 227 (the controls below offer 227). As in the
# papers, $B_r$ is `block_q` and $B_c$ is `block_k`. **Predict first**: which $B_r$ and $B_c$ (powers of two) move
# least?

# %%
predicted_blocks = None  # your guess, (Br, Bc)

# %%
from labsupport.analysis.explorer import tile_explorer
from labsupport.analysis.tiles import best_choice, tile_choices

tiles = tile_choices(4096, 64, fast_bytes=228 * 1024)
print(f"moves least: (Br, Bc) = {best_choice(tiles)}; your guess: {predicted_blocks}")
plotting.plot_tile_choices(tiles)

# %%
tile_explorer(seqlen=4096, head_dim=64)

# %% [markdown]
# The controls need a running notebook; the picture above is one setting of them. In this count, the block that stays
# ($B_r$ in version 2) should be as large as fits, and the other may be small. Real kernels use 64 or 128 by 64 or 128,
# for several reasons. The accumulator is in *registers*: 512 rows of 64 float32 numbers take half of a multiprocessor's
# registers. Tensor cores multiply at least 16 columns at a time, and need more to be busy. Several blocks of K and V
# must be loading at the same time. And a small number of large programs leaves multiprocessors idle. Traffic is only
# one cost, and with an L2 cache not the highest. So kernels are *tuned*:

# %%
tuned = load_run("tune-forward-h200").query("seqlen == 4096 and head_dim == 64 and not causal")
tuned = tuned.sort_values("median_ms")[
    ["block_q", "block_k", "warps", "stages", "median_ms", "ratio"]
]
print(pd.concat([tuned.head(4), tuned.tail(3)]).round(3).to_string(index=False))

# %% [markdown]
# These are the fastest four and the slowest three of 27 tilings of one algorithm: the lab's plain Triton kernel on an
# H200. *warps* are groups of 32 threads of a program; *stages* is the number of blocks of
# K and V that are loaded ahead.

# %% [markdown]
# ## 4.4 · The kernel
#
# *Core · 65 minutes*
#
# Now write a kernel. In Triton you write what *one program* does with its block of numbers. `tl.program_id` gives the
# program's block; `tl.load` and `tl.store` move blocks between memory and registers. The smallest example doubles a
# vector. Without a GPU, Triton's interpreter runs the same code with NumPy: it is slow, but you can debug it like any
# Python.

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
def double_kernel(X, OUT, n, BLOCK: tl.constexpr):
    """One program doubles one block. X and OUT point to the first element."""
    first = tl.program_id(0) * BLOCK  # this program's block begins here
    places = first + tl.arange(0, BLOCK)
    exist = places < n  # the last block may reach beyond the end
    numbers = tl.load(X + places, mask=exist)
    tl.store(OUT + places, 2 * numbers, mask=exist)


if can_run:
    x = torch.arange(10.0, device=device)
    doubled = torch.empty_like(x)
    double_kernel[(3,)](x, doubled, 10, BLOCK=4)  # three programs for ten numbers
    print(doubled.tolist())


# %% [markdown]
# ### Exercise 4-3 · A FlashAttention kernel, in four steps
# ●●● · 60 minutes · 10 points
#
# You write four kernels; each prepares the next. Each comes with a *launcher*, a Python function that takes and returns
# tensors. A kernel writes wherever its pointers point: a store without a mask overwrites what comes after the tensor
# and may crash Python. So the launchers leave some room there (`guarded_zeros`) and check it afterwards.
#
# #### Step 1 · Add two vectors · 5 minutes, 1 point
#
# ![Ten numbers in memory and three programs of four lanes: two lanes of the last program lie beyond the end, and the mask is False there.](../theory/figures/triton-programs.png)
#
# Complete the kernel; its launcher is given.


# %% nbgrader={"grade": false, "grade_id": "ex-4-3-add", "locked": false, "schema_version": 3, "solution": true, "task": false}
@triton.jit
def add_kernel(X, Y, OUT, n, BLOCK: tl.constexpr):
    """One program adds one block of X and Y."""
    ### BEGIN SOLUTION
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(X + i, mask=inside)
    y = tl.load(Y + i, mask=inside)
    tl.store(OUT + i, x + y, mask=inside)
    ### END SOLUTION


def add(x, y, block=1024):
    """x + y of two vectors."""
    out = guarded_zeros(len(x), like=x)
    add_kernel[(triton.cdiv(len(x), block),)](x, y, out, len(x), BLOCK=block)
    check_guard(out)
    return out


# %% nbgrader={"grade": true, "grade_id": "ex-4-3-add-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_triton_add(add_kernel)
### BEGIN HIDDEN TESTS
checks.check_triton_add(add_kernel, seed=33)
### END HIDDEN TESTS

# %% [markdown]
# #### Step 2 · Softmax of rows · 12 minutes, 1 point
#
# One program computes one row of `X`, in blocks of columns, because a row may be longer than a block. It goes over the
# row twice: first for the maximum `m` and the sum `l`, as in exercise 1-3, then to store $e^{x - m} / l$. Row `i`
# begins at `X + i * stride_x`, and at `OUT + i * stride_out`.
#
# You also have `tl.max(x, 0)` and `tl.sum(x, 0)` of a block, `tl.maximum(a, b)`, `tl.exp(x)`, and loops over `tl.range(0, n, BLOCK)`.
# `tl.load(..., mask=inside, other=7.0)` gives 7 where the mask is false. `tl.arange` takes constants only: write `first + tl.arange(0, BLOCK)`.
# A loop's variables must keep their type: begin with `tl.full([], value, tl.float32)`, a single number, and not with `l = 0`.
#
# <details><summary>Hint 1: a nudge</summary>
#
# What should a lane beyond the row's end hold, so that it changes neither maximum nor sum?
#
# <details><summary>Hint 2: the idea</summary>
#
# `tl.load(..., mask=inside, other=-float("inf"))`: the maximum ignores it, and its exponential is 0.
#
# <details><summary>Hint 3: an outline</summary>
#
# First loop: load a block, `m_new` = maximum of `m` and the block's, `l = l * tl.exp(m - m_new)` + the block's sum of `exp(x - m_new)`,
# `m = m_new`. Second loop: load the block again, and store `tl.exp(x - m) / l` under the same mask.
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-3-softmax", "locked": false, "schema_version": 3, "solution": true, "task": false}
@triton.jit
def softmax_kernel(X, OUT, stride_x, stride_out, n, BLOCK: tl.constexpr):
    """One program computes one row of n numbers, block by block, in two passes."""
    ### BEGIN SOLUTION
    X += tl.program_id(0) * stride_x
    OUT += tl.program_id(0) * stride_out
    c = tl.arange(0, BLOCK)
    m = tl.full([], -float("inf"), tl.float32)
    l = tl.full([], 0.0, tl.float32)
    for start in tl.range(0, n, BLOCK):
        x = tl.load(X + start + c, mask=start + c < n, other=-float("inf"))
        m_new = tl.maximum(m, tl.max(x, 0))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)
        m = m_new
    for start in tl.range(0, n, BLOCK):
        x = tl.load(X + start + c, mask=start + c < n, other=-float("inf"))
        tl.store(OUT + start + c, tl.exp(x - m) / l, mask=start + c < n)
    ### END SOLUTION


def row_softmax(x, block=1024):
    """The softmax of each row of x, (rows, columns)."""
    out = guarded_zeros(*x.shape, like=x)
    softmax_kernel[(len(x),)](x, out, x.stride(0), out.stride(0), x.shape[1], BLOCK=block)
    check_guard(out)
    return out


# %% nbgrader={"grade": true, "grade_id": "ex-4-3-softmax-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_triton_softmax(softmax_kernel)
### BEGIN HIDDEN TESTS
checks.check_triton_softmax(softmax_kernel, seed=34)
### END HIDDEN TESTS

# %% [markdown]
# #### Step 3 · The heart · 13 minutes, 4 points
#
# The softmax of step 2 stores N numbers a row. FlashAttention stores none of them: it adds each tile of scores to a
# running output.
#
# Write `update(m, l, acc, scores, v) -> (m, l, acc)`. It is called once for each tile of keys.
#
# | | shape | dtype |
# | --- | --- | --- |
# | `m`, `l` | `(block_q,)` | float32; begin as -inf and 0 |
# | `acc` | `(block_q, head_dim)` | float32; begins as 0 |
# | `scores` | `(block_q, block_k)` | float32; -inf hides a key |
# | `v` | `(block_k, head_dim)` | that of the inputs, float16 say |
#
# The scores are multiplied by $\log_2 e$ already. So `tl.exp2(scores)` is $e$ to the power of the plain scores, and a GPU has an
# instruction for powers of 2. After the
# last tile, `acc / l` must be attention's output, and `m + log2(l)` its log-sum-exp, in base 2. A row that has seen no key keeps
# `m` = -inf, `l` = 0 and `acc` = 0.
#
# You have `tl.maximum(a, b)`, `tl.max(x, 1)`, `tl.sum(x, 1)`, `tl.exp2(x)`, `tl.where(condition, a, b)`, `tl.dot(a, b)`, `x.to(dtype)`,
# `x[:, None]`, and arithmetic. There is no `if` on a tensor. `tl.dot` wants both factors in one dtype, and adds up in float32: round the
# weights $P$ to the dtype of `v` for that product, and keep everything else in float32.
#
# <details><summary>Hint 1: a nudge</summary>
#
# It is the online softmax of exercise 1-3, row by row in a tile. Which of its three quantities must shrink when the maximum rises?
#
# <details><summary>Hint 2: the idea</summary>
#
# The old sum and the old accumulator shrink by the same factor $\alpha = 2^{m_\text{old} - m_\text{new}}$; `alpha[:, None]` for the
# accumulator. For a row without a key this is $-\infty - (-\infty)$: subtract 0 there instead of `m_new`.
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


# %% nbgrader={"grade": true, "grade_id": "ex-4-3-kernel-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
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
# #### Step 4 · The whole kernel · 30 minutes, 4 points
#
# Around `update`, one program computes `BLOCK_Q` queries of one head: the left half of this drawing.
#
# ![Two loop orders. Left, queries outside: one program keeps O of its block while the keys pass. Right, keys outside, as in the backward pass.](../theory/figures/loop-order.png)
#
# | argument | |
# | --- | --- |
# | `Q, K, V, OUT` | pointers to `(heads, seqlen, D)`. Element (h, n, d) lies at `Q + h * stride_qh + n * stride_qn + d` |
# | `LSE` | pointer to `(heads, n_q)`, float32, contiguous: the natural log-sum-exp |
# | `scale` | $\log_2 e / \sqrt{D}$: multiply the products by it, and the scores are ready for `update` |
# | `n_q`, `n_k` | how many queries and keys there are; blocks need not divide them |
# | `CAUSAL` | query i sees the keys up to i + `n_k` - `n_q`. Do not load a tile that no query of the block sees |
#
# A tile of pointers is a column plus a row: `Q + rows[:, None] * stride_qn + d[None, :]`. You also have `tl.zeros([n], tl.float32)`,
# `tl.full`, `tl.trans(x)`, `tl.log2(x)` and `tl.minimum(a, b)`.
#
# First make it correct. Then make it fast: a mask takes time on every tile, but few tiles need one.
#
# A row that sees no key stores 0, and -inf as its log-sum-exp. `tl.program_id(0)` is the block of queries, `tl.program_id(1)` the head.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Draw a 5 × 5 matrix of scores with tiles of 2 × 2. Which lanes of the last tiles lie outside? Which tiles does a causal mask empty?
#
# <details><summary>Hint 2: the idea</summary>
#
# Head `head` of `Q` begins at `Q + head * stride_qh`. Mask loads and stores with
# `rows[:, None] < n_q`, keys with `cols[:, None] < n_k`. Scores of keys that do not exist or are hidden become -inf before `update`
# sees them. The causal loop ends at the last key that the block's last query sees. Most tiles lie before the first key that
# the block's *first* query does not see: they need no mask, and are faster without.
#
# <details><summary>Hint 3: an outline</summary>
#
# 1. `rows`, `d` and `c` by `tl.arange`; load `q`; start `m`, `l`, `acc` as `update` wants them.
# 2. `stop = n_k`; if `CAUSAL`: the smaller of it and `(tl.program_id(0) + 1) * BLOCK_Q + n_k - n_q`. In the same way `full`, the keys that
#    the first query sees, too: `n_k`, or the smaller of it and `tl.program_id(0) * BLOCK_Q + n_k - n_q + 1`.
# 3. For `j` in `tl.range(0, stop, BLOCK_K)`: load `k` and `v`; `scores` are `q` times the transposed `k`, scaled; hide if
#    `j + BLOCK_K > full`; `update`.
# 4. Divide by `l` (by 1 where it is 0), store; the log-sum-exp is `(m + tl.log2(l)) * 0.6931`, with log(2) = 0.6931471805599453.
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
    ### BEGIN SOLUTION
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    c, d = tl.arange(0, BLOCK_K), tl.arange(0, D)
    existing = rows[:, None] < n_q
    q_at = Q + head * stride_qh + rows[:, None] * stride_qn + d[None, :]
    q = tl.load(q_at, mask=existing, other=0.0)
    m = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    stop, full = n_k, n_k  # the keys that some query of the block sees, and that all see
    if CAUSAL:
        stop = tl.minimum(n_k, (tl.program_id(0) + 1) * BLOCK_Q + n_k - n_q)
        full = tl.minimum(n_k, tl.program_id(0) * BLOCK_Q + n_k - n_q + 1)
    for j in tl.range(0, stop, BLOCK_K):
        cols = j + c
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
    divisor = tl.where(l == 0.0, 1.0, l)
    out_at = OUT + head * stride_oh + rows[:, None] * stride_on + d[None, :]
    tl.store(out_at, acc / divisor[:, None], mask=existing)
    lse = (m + tl.log2(divisor)) * 0.6931471805599453  # log(2)
    tl.store(LSE + head * n_q + rows, lse, mask=rows < n_q)
    ### END SOLUTION


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


# %% nbgrader={"grade": true, "grade_id": "ex-4-3-flash-values", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
checks.check_triton_flash_values(flash_kernel)
### BEGIN HIDDEN TESTS
checks.check_triton_flash_values(flash_kernel, seed=35)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-3-flash-edges", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_triton_flash_edges(flash_kernel)
### BEGIN HIDDEN TESTS
checks.check_triton_flash_edges(flash_kernel, seed=36)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-3-flash-skips", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_triton_flash_skips(flash_kernel)
### BEGIN HIDDEN TESTS
checks.check_triton_flash_skips(flash_kernel, seed=37)
### END HIDDEN TESTS

# %% [markdown]
# That is a complete FlashAttention forward. Your kernel and the lab's run on real inputs, are compared with the oracle
# in float64, and timed. (On a CPU this is the interpreter's time, which says nothing about a GPU. float16 itself rounds
# numbers near 1 by up to 5e-04.)

# %%
from labsupport.attention import oracle_attention


def lab_triton_flash(q, k, v, causal):
    """The lab's own kernels, which take (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = attention(q, k, v, causal=causal, backend="flash_triton", return_lse=True)
    return out[0].transpose(0, 1), lse[0]


if can_run:
    n = 4096 if gpu else 96
    qh, kh, vh = (torch.randn(8, n, 64, device=device, dtype=torch.float16) for _ in range(3))
    exact, exact_lse = oracle_attention(qh, kh, vh, causal=True)
    for name, one in {"yours": my_triton_flash, "the lab's": lab_triton_flash}.items():
        call = partial(one, qh, kh, vh, causal=True)
        try:
            out, lse = call()
        except Exception as error:  # not written yet, or not part of this edition
            print(f"{name:9} does not run here ({type(error).__name__})")
            continue
        off = (out - exact).abs().max(), (lse - exact_lse).abs().max()
        ms = min(milliseconds(call) for _ in range(5 if gpu else 2))
        print(
            f"{name:9} output {off[0]:.0e} off, log-sum-exp {off[1]:.0e}, fastest call {ms:.3g} ms"
        )
else:
    print("The kernel cannot run here:", mode.missing())

# %% [markdown]
# A correct kernel is not yet a fast one. Speed depends on:
#
# - *tiles*, warps and stages: a factor of 1.8 between the best and the worst, above;
# - *resources*: in the lab's repository, `python -m benchmarks resources --capability 90 --head-dim 64 --kernel forward`
#   compiles for a GPU that you don't need to have. In bfloat16 it reports: 110 registers a thread, 64 KiB of shared
#   memory, nothing spilled, 2 programs on a multiprocessor;
# - *overlap*: while tensor cores multiply, the exponentials of another tile should be computed, and the next blocks fetched. The
#   profiler found this lab's forward waiting: its *tensor pipe*, the tensor cores' queue, was active 57% of the time.
#
# ![Three timelines of the same work. In order, tensor cores wait during each softmax and are busy 59% of the time. Pipelined within one group, 84%. With two groups that take turns, 100%](../theory/figures/versions-overlap.png)
#
# How fast can it get? Forward, head_dim 128, no mask, 16,384 tokens a call, in TFLOP/s of the kernels alone, each
# measured for a second (`gluon-peers-h200`). A large matrix product, measured in the same way, reaches 757
# (`data/runs/gluon-notes.md`).

# %%
kernels = load_run("gluon-peers-h200")
speeds = kernels[(kernels.head_dim == 128) & ~kernels.causal]
speeds.pivot(index="backend", columns="seqlen", values="tflops").sort_values(16_384).round(
    0
).astype(int)

# %%
from labsupport.profiling.tables import compare_with_peers, geometric_means

for ours in ("flash_triton", "flash_gluon"):
    print(ours)
    print(geometric_means(compare_with_peers(kernels, ours)).round(2).to_string(index=False))

# %% [markdown]
# These are the speeds of the lab's kernels relative to each other implementation: the geometric mean over all shapes of
# that run, and the smallest ratio. The Triton kernel is faster than PyTorch's FlashAttention-2 and FlexAttention, and
# slower than cuDNN and FlashAttention-4. Those two overlap softmax and tensor cores, which Triton cannot express.
# `flash_gluon` does: it is the lab's kernel in Gluon, the language below Triton, where groups of warps have different
# jobs. Chapter 5, "From Triton to Gluon", builds it in four steps. All these kernels compute the same with the same few
# lines.

# %% [markdown]
# ## 4.5 · Batch, length, heads
#
# *Further (optional).* How does time grow? FLOPs are proportional to batch, to heads, and to $N^2$. If only FLOPs took
# time, time would be too.
#
# **Predict first**: how many times as long does FlashAttention take for 16 times as many *tokens in one sequence*, and
# for 16 times the *batch*?

# %%
predicted_length_factor = None  # your guess for the length
predicted_batch_factor = None  # and for the batch

# %%
lengths = [512, 1024, 2048, 8192] if gpu else [128, 512, 1024, 2048]
axes = {"dtype": name_of_dtype, "heads": heads}
short = lengths[0] if gpu else 256
by_length = run_grid(
    grid(["standard", "sdpa_flash"], lengths, **axes), measure_error=False, max_seconds=0.2
)
by_batch = run_grid(
    grid(["sdpa_flash"], [short], batch=[1, 16], **axes), measure_error=False, max_seconds=0.2
)
by_heads = run_grid(
    grid(["sdpa_flash"], [short], heads=[1, 16], dtype=name_of_dtype),
    measure_error=False,
    max_seconds=0.2,
)


def times_as_long(table, column):
    table = table[table.backend == "sdpa_flash"].set_index(column).median_ms
    return table.loc[table.index.max()] / table.loc[table.index.min()]


checks.compare_prediction(
    "16 times the length", predicted_length_factor, times_as_long(by_length, "seqlen"), "times"
)
checks.compare_prediction(
    "16 times the batch", predicted_batch_factor, times_as_long(by_batch, "batch"), "times"
)
print(f"16 times the heads: {times_as_long(by_heads, 'heads'):.3g} times")

# %%
from labsupport.profiling import arithmetic_bound_ms

flash_ms = by_length[by_length.backend == "sdpa_flash"].sort_values("seqlen").median_ms.to_numpy()
steps_of_n = np.log(flash_ms[1:] / flash_ms[:-1]) / np.log(np.divide(lengths[1:], lengths[:-1]))
plotting.plot_time(
    by_length,
    title=f"FlashAttention's time grows as N to the power of {steps_of_n[0]:.1f} among the "
    f"shortest, of {steps_of_n[-1]:.1f} among the longest",
    references=[plotting.Reference("arithmetic alone", arithmetic_bound_ms(by_length, peak))],
)

# %%
both = pd.concat([by_batch, by_heads]).drop_duplicates(["batch", "heads"])
both["tokens x heads"] = both.batch * both.heads * both.seqlen
both[["seqlen", "batch", "heads", "median_ms", "tflops"]].round(4)

# %% [markdown]
# To a kernel, batch and heads are the same: independent work. Once the device is full, twice as much takes about twice
# the time. Before that it takes less than twice, because idle units join in; when the data no longer fits into a cache,
# it takes more. Time grows with the length squared. (Calls of less than a millisecond vary: on a busy machine, look at
# the long ones.)
#
# **"Flash is always faster."** Compare calls in the same dtype. How many times as fast as the textbook is
# FlashAttention on one thread of a server's CPU (`calibration-cpu`), in bfloat16 and in float32?

# %%
cpu = load_run("calibration-cpu")
plain = cpu[
    (cpu.direction == "forward")
    & (cpu.batch == 1)
    & (cpu.heads == 4)
    & (cpu.kv_heads == 4)
    & (cpu.head_dim == 64)
    & ~cpu.causal
]
faster = speedup(plain[plain.backend.isin(["standard", "sdpa_flash"])]).query(
    "backend == 'sdpa_flash'"
)
faster.pivot(index="dtype", columns="seqlen", values="speedup").round(2)

# %% [markdown]
# Below 1 the textbook is faster. Its matrix products are highly optimised, and while $S$ fits into a cache, there is
# nothing to save. FlashAttention needs less *memory* at any length.
#
# ### The same on an H200, recorded
#
# Batch 4, 16 heads of 64, bfloat16, forward, without a mask:

# %%
long_ones = forward[~forward.causal & (forward.seqlen == 16_384)].set_index("backend").median_ms
apart = long_ones["flash_torch"] / long_ones["fa4"]
plotting.plot_time(
    recorded[(recorded.direction == "forward") & ~recorded.causal],
    title=f"One algorithm, and a factor of {apart:.0f} between its programs",
    references=[
        plotting.Reference(
            "arithmetic alone",
            arithmetic_bound_ms(
                recorded[recorded.direction == "forward"].query("not causal"),
                ceiling["matmul_tflops"]["bfloat16"],
            ),
        )
    ],
)

# %% [markdown]
# `flash_torch` is also FlashAttention, written in PyTorch: each tile is a few kernels, launched from Python, so it saves
# all the memory, but is slower than the textbook. The algorithm alone does not decide the speed.
#
# **Starting up.** The kernels' own time compared with that of the call from Python, 512 tokens a sequence, 16,384 in
# all (`peers-h200`):

# %%
peers = load_run("peers-h200")
starts = peers[(peers.seqlen == 512) & (peers.head_dim == 64) & ~peers.causal]
starts = starts.set_index(["direction", "backend"])[["median_ms", "call_ms"]]
starts.assign(share=starts.median_ms / starts.call_ms).round(3)

# %% [markdown]
# Up to half of a call is spent waiting for Python. Larger batches, CUDA graphs (many launches recorded, and replayed as
# one) and `torch.compile` help; a faster kernel does not.
#
# **Enough programs?** An H200 has 132 multiprocessors. FlashAttention's first version starts one program for each head
# of each sequence. The second one starts a program for each block of 128 queries of each head. What happens if there
# are few heads? 16,384 tokens in all, head_dim 64, no mask (`loop-orders-h200`). The versions differ in two ways: the
# loop order and the tiles. `same_tiles_ms` is version 2 with version 1's small tiles, so `order` is the gain from the
# loop order alone, and `tiles` the gain from larger tiles:

# %%
orders = load_run("loop-orders-h200").query("head_dim == 64 and not causal")
orders = orders.assign(
    order=orders.version1_ms / orders.same_tiles_ms, tiles=orders.same_tiles_ms / orders.version2_ms
)
names = ["seqlen", "version1_programs", "version1_ms", "same_tiles_ms", "version2_programs"]
orders[[*names, "version2_ms", "order", "tiles"]].round(2)


# %% [markdown]
# From 1 to 16 programs, version 1 takes nearly the same time for 16 times the work: 15 more multiprocessors join in,
# and 116 are still idle. *This* is why version 2 swapped the loops. With 16 programs the order gains a factor of 19:
# idle multiprocessors explain 132 / 16 = 8 of it, and the time that a lone program spends waiting explains the rest.
# With 128 programs hardly any multiprocessor is idle, and the order alone gains 2, about what the paper gains over its
# own, tuned version 1 ([chapter 5](../theory/05-from-v1-to-v4.md)). Large tiles gain another 3.5 to 4.5. If you
# compared whole programs (9 to 779 here), you would credit the loop order with that too.
#
# In version 2, from 128 to 256 programs, the work doubles but the time grows by half. With 128 programs, four
# multiprocessors are idle. Each of the others runs one program, although two could use each other's waiting time. From
# 256 to 512 programs the time doubles. Such steps are called *wave quantisation*: programs start in *waves*, as many as
# fit at a time, and the last wave costs as much as a full one.
#
# ![Left, by formula: the share of slots at work is a saw-tooth that falls to a half after the first wave, and by less and less after later ones. Right: recorded times of a kernel with 128, 256, 512 and 1024 programs lie on staircases of 132 programs a step for head_dim 128 and of 264 for head_dim 64; with 128 programs head_dim 64 lies below its first step](../theory/figures/performance-waves.png)

# %% [markdown]
# ## 4.6 · Can it be predicted?
#
# *Further (optional).* A simple model has two numbers: the time to start a call, and the rate at which it then works.
#
# $$t = t_0 + \frac{\text{FLOPs}}{\text{rate}}$$
#
# A model is good if it predicts shapes that it *has not seen*. So some rows are *held out*: they are not used for the
# fit.

# %% [markdown]
# ### Exercise 4-4 · Two numbers that predict
# ●●○ · 15 minutes · 3 points
#
# | function | takes | returns |
# | --- | --- | --- |
# | `fit_time(flops, ms)` | NumPy arrays `(n,)`, float64 | `(start_ms, tflops)`, with the least sum of squares of *relative* errors, (predicted - measured) / measured |
# | `predict_time(flops, start_ms, tflops)` | a number, or an array | the time in ms: a number, or an array |
# | `held_out_error(table)` | a DataFrame: `flops`, `median_ms`, `status`, `held_out` (bool) | `(start_ms, tflops, error)` |
#
# `tflops` is in $10^{12}$ a second. `held_out_error` drops rows whose `status` is not `"ok"` (their time is NaN), fits
# the rows that are not held out, and tests on those that are. `error` is the mean of |predicted - measured| / measured,
# a fraction. Don't change the table.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Two calls, 1 ms and 100 ms, are each predicted 10% too high. How much does each add to a sum of squares of errors in
# ms, and of relative errors?
#
# <details><summary>Hint 2: the idea</summary>
#
# For relative errors, divide the equation `start + slope * work = ms` by `ms`. This gives two unknowns, one row for
# each measurement, and a 1 on the right: `np.linalg.lstsq`. Work in $10^9$ FLOPs keeps the numbers similar in size.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# fit_time        work = flops / 1e9;  columns 1 / ms and work / ms;  lstsq against ones  ->  start, slope;  tflops = 1 / slope
# predict_time    start_ms + flops / (tflops 1e12) seconds, in ms
# held_out_error  rows that ran  ->  fit those not held out  ->  predict those held out  ->  mean of |error| / measured
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-4-predict", "locked": false, "schema_version": 3, "solution": true, "task": false}
def fit_time(flops, ms):
    """(start_ms, tflops) with the least relative errors."""
    ### BEGIN SOLUTION
    work = flops / 1e9
    rows = np.stack([1 / ms, work / ms], axis=1)
    (start_ms, slope), *_ = np.linalg.lstsq(rows, np.ones(len(ms)))
    return start_ms, 1 / slope
    ### END SOLUTION


def predict_time(flops, start_ms, tflops):
    """ms of a call, or of each."""
    ### BEGIN SOLUTION
    return start_ms + flops / tflops / 1e9
    ### END SOLUTION


def held_out_error(table):
    """(start_ms, tflops, error): fitted on some rows, judged on the others."""
    ### BEGIN SOLUTION
    ran = table[table.status == "ok"]
    seen, unseen = ran[~ran.held_out], ran[ran.held_out]
    start, rate = fit_time(seen.flops.to_numpy(), seen.median_ms.to_numpy())
    predicted, measured = predict_time(unseen.flops, start, rate), unseen.median_ms
    error = ((predicted - measured).abs() / measured).mean()
    return start, rate, float(error)
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-4-4-predict-fit", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_fit(fit_time)
### BEGIN HIDDEN TESTS
checks.check_fit(fit_time, seed=41)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-4-predict-time", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_predict(predict_time)
### BEGIN HIDDEN TESTS
checks.check_predict(predict_time, seed=42)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-4-predict-held-out", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_held_out(held_out_error)
### BEGIN HIDDEN TESTS
checks.check_held_out(held_out_error, seed=43)
### END HIDDEN TESTS

# %% [markdown]
# Now use it on recorded runs. The package's own predictor (`labsupport.analysis.predictor`) is fitted and tested on the
# same rows as yours: of `attention-h200` the lengths 512, 4,096 and 16,384 are fitted, the three between them held out.
# It counts more than FLOPs: tiles, exponentials, bytes, and the cost of a causal mask along its diagonal. One fit
# serves both masks. Forward only, errors in percent.
#
# **Predict first**: how large is the error of your two numbers for cuDNN, without a mask?

# %%
predicted_error = None  # your guess, in percent

# %%
from labsupport.analysis.predictor import SPLITS, with_predictions
from labsupport.profiling.grids import case_of

own_held_out = checks.solution_or_reference(
    held_out_error, checks.ex_4_4_predict.held_out_error, checks.check_held_out
)
fused = ["sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "fa4", "flex"]
run = load_run("attention-h200").query("direction == 'forward' and backend in @fused").copy()
cases = [case_of(row) for row in run.to_dict("records")]
run["flops"] = [case.flops() for case in cases]
run["held_out"] = [not SPLITS["attention-h200"].calibrates(case) for case in cases]
model, unseen = analysis.calibrate_run("attention-h200")
package = with_predictions(unseen, model).query("direction == 'forward'")
package = 100 * package.error.abs().groupby([package.backend, package.causal]).mean()
rows = []
for key, group in run.groupby(["backend", "causal"]):
    start_ms, tflops, error = own_held_out(group)
    rows.append([*key, 1e3 * start_ms, tflops, 100 * error, package[key]])
columns = ["backend", "causal", "start, µs", "TFLOP/s", "two numbers, %", "package, %"]
found = pd.DataFrame(rows, columns=columns)
cudnn = found[(found.backend == "sdpa_cudnn") & ~found.causal]["two numbers, %"].iloc[0]
checks.compare_prediction("Two numbers, cuDNN, no mask", predicted_error, cudnn, "%")

# %% tags=["nbval-check-output"]
print(found.round(1).to_string(index=False))

# %% [markdown]
# ![Predicted over measured times of held-out shapes in two recorded runs: most points lie within a few percent of 1, the outliers are short calls.](../theory/figures/performance-predicted.png)
#
# (The plot shows the package's predictor on two whole runs.) Without a mask, two numbers predict cuDNN's times within
# about one percent, which is better than the package's one fit for everything. With a causal mask the error is several
# times as large. Why? A tile on the diagonal is computed whole, masked, and half of it is thrown away. There are
# $N / B$ such tiles, so this cost is proportional to $N$. It is neither a start, which is always the same, nor $N^2$.
# Test this explanation: count the FLOPs of the tiles that are computed, instead of visible pairs.

# %% tags=["nbval-check-output"]
from labsupport.analysis.traffic import Sizes
from labsupport.analysis.traffic.formulas import visible_tiles

causal_rows = run.query("causal and backend == 'sdpa_cudnn'")
for tile in (1, 64, 128, 256):
    sizes = [Sizes(n, n, 64, tile, tile, True) for n in causal_rows.seqlen]
    computed = [4 * 4 * 16 * 64 * visible_tiles(size) * tile**2 for size in sizes]
    error = own_held_out(causal_rows.assign(flops=computed))[2]
    print(f"tiles of {tile:3} x {tile:3}: {error:.1%} off")

# %% [markdown]
# Tiles explain only part of the error, so something else along the diagonal costs time too. The package has a term for
# it. A model can also look right when its test rows are too similar. If batch times length is the same in every row,
# the diagonal costs the same in every row and cannot be separated from the start ([chapter
# 8](../theory/08-performance-model.md#how-good-is-it) tests other runs, and a CPU). Here is one full prediction, with
# its interval and its reasons:

# %%
asked = Case("sdpa_cudnn", 6144, batch=4, heads=16, dtype="bfloat16", causal=True)
print(analysis.predict(asked, model))

# %% [markdown]
# ## 4.7 · Other hardware
#
# *Further (optional).* How fast would another GPU be? The table shows specifications (`data/hardware.csv`, each row
# with its source) and the ridge in half precision that follows from them. A case of lower intensity is bound by memory
# on that GPU:

# %%
from labsupport.profiling import hardware_table

names = ["V100 SXM2 32 GB", "A100 SXM 80 GB", "RTX 4090", "L4", "H100 SXM", "H200", "B200"]
gpus = hardware_table().set_index("name").loc[names]
half = gpus.bf16_tflops.fillna(gpus.fp16_tflops)
table = {
    "GB/s": gpus.bandwidth_gb_s,
    "TFLOP/s, 16 bit": half,
    "ridge, FLOPs a byte": half * 1e3 / gpus.bandwidth_gb_s,
    "shared memory, KiB": gpus.shared_kib_per_sm,
    "L2, MiB": gpus.l2_mib,
}
ridge = Roof.of(ceilings).ridge(name_of_dtype)
print(f"ridge of this device, {name_of_dtype}, measured: {ridge:.0f} FLOPs a byte")
pd.DataFrame(table).round().astype(int)

# %% [markdown]
# From V100 to B200 the ridge has doubled: arithmetic grew faster than bandwidth, so more cases are bound by memory. (An
# H200 is an H100 with faster memory, so its ridge is lower again; the L4 has much arithmetic and little bandwidth.)
# Your own device's ridge is printed above the table. A CPU's ridge is far lower, so nearly all of attention is bound by
# arithmetic there.
#
# `transfer` applies a calibrated model to a GPU that nobody measured, *from its specification alone*. It assumes that
# the same program reaches the same share of that GPU's ceilings. The intervals are wide, and wider for another
# generation, because there the assumption is weaker: FlashAttention-2 reaches up to 73% of an A100's peak, and 35% of
# an H100's (abstracts of the papers of versions 2 and 3).

# %%
from labsupport.profiling.hardware import read_specs

long = Case("sdpa_flash", 8192, batch=4, heads=16, dtype="bfloat16", causal=True)
specs = {spec.name: spec for spec in read_specs()}
rows = []
for name in ("H200", "H100 SXM", "B200", "A100 SXM 80 GB", "RTX 4090", "RTX 3090", "L4", "T4"):
    try:
        found = analysis.predict(long, analysis.transfer(model, name))
    except ValueError as problem:
        print(f"{name}: {problem}")
        continue
    bound = roofline([long], specs[name]).bound_ms.iloc[0]
    rows.append([name, found.ms, found.low_ms, found.high_ms, bound])
elsewhere = pd.DataFrame(rows, columns=["device", "ms", "low_ms", "high_ms", "bound_ms"])
ran = recorded.query(
    "backend == 'sdpa_flash' and direction == 'forward' and causal and seqlen == 8192"
)
elsewhere["measured_ms"] = elsewhere.device.map({"H200": ran.median_ms.iloc[0]})
plotting.plot_predictions(
    elsewhere,
    title="FlashAttention-2 on other GPUs: predictions and their intervals",
    small_print="sdpa_flash, forward, causal, N = 8192, batch 4, 16 heads of 64, bfloat16. "
    "Calibrated on an H200 (attention-h200; this length was held out), carried over by "
    "specification alone: nothing was measured on the other GPUs",
)


# %% [markdown]
# You can test each line: run `labsupport bench --seqlen 8192 --batch 4 --nheads 16 --headdim 64 --causal` on that GPU.
# A V100 or T4 has no bfloat16 tensor cores and no FlashAttention-2: use SDPA's memory-efficient kernel there, in
# float16.

# %% [markdown]
# ## 4.8 · Which one to take
#
# *Core.* Now use all this to decide. You get a workload, a memory limit, a dtype, and a table of times, some measured,
# some predicted.

# %% [markdown]
# ### Exercise 4-5 · Choose
# ●●○ · 10 minutes · 3 points
#
# `choose(table, *, memory_bytes, dtype) -> str | None`
#
# `table` is a DataFrame with the columns `backend`, `dtype` (such as `"bfloat16"`), `source` (`"measured"` or
# `"predicted"`), `status` (`"ok"`, or why not), `ms` and `peak_memory_bytes`. A backend has at most one row for each
# dtype and source. Don't change the table.
#
# 1. Only rows of the `dtype` count. Where a backend has a measured row, its predicted one does not count, whatever the measured one
#    says.
# 2. Only rows with status `"ok"` and `peak_memory_bytes <= memory_bytes` are left.
# 3. Times up to 5% above the fastest of those that are left are a *tie*: the one with the least memory wins.
#
# Return the backend's name, or `None` if nothing is left.
#
# <details><summary>Hint 1: a nudge</summary>
#
# In which order must you apply the three rules? Think of a backend that ran out of memory when measured, and that also
# has a prediction.
#
# <details><summary>Hint 2: the idea</summary>
#
# `isin` finds the backends that were measured. The 5% count from the fastest row that is *left*. `idxmin` returns a row's label, with
# which `.loc` finds the name. `table["dtype"]` is the column; so is `table["backend"]`.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# rows of the dtype  ->  measured rows, and predicted ones whose backend was not measured
#                    ->  status "ok" and within the memory;  None if no row is left
#                    ->  ms at most 1.05 times the least  ->  the one with the least memory: its backend
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-5-choose", "locked": false, "schema_version": 3, "solution": true, "task": false}
def choose(table, *, memory_bytes, dtype):
    """The backend to take, or None."""
    ### BEGIN SOLUTION
    rows = table[table["dtype"] == dtype]
    measured = rows[rows.source == "measured"].backend
    rows = rows[(rows.source == "measured") | ~rows.backend.isin(measured)]
    rows = rows[(rows.status == "ok") & (rows.peak_memory_bytes <= memory_bytes)]
    if rows.empty:
        return None
    tied = rows[rows.ms <= 1.05 * rows.ms.min()]
    return tied.loc[tied.peak_memory_bytes.idxmin(), "backend"]
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-4-5-choose-limits", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_choice_limits(choose)
### BEGIN HIDDEN TESTS
checks.check_choice_limits(choose, seed=51)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-5-choose-ties", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_choice_ties(choose)
### BEGIN HIDDEN TESTS
checks.check_choice_ties(choose, seed=52)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-5-choose-sources", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_choice_sources(choose)
### BEGIN HIDDEN TESTS
checks.check_choice_sources(choose, seed=53)
### END HIDDEN TESTS

# %% [markdown]
# An H200, batch 4, 16 heads of 64, no mask, forward. Some lengths were measured, others are only predicted. **Predict
# first**: which backend for 512 tokens, which for 16,384?

# %%
predicted_choices = None  # your guess: two names

# %%
model, _ = analysis.calibrate_run("attention-h200")


def options(seqlen):
    """Measured and predicted rows of a length, as `choose` wants them."""
    measured = recorded.query("direction == 'forward' and not causal and seqlen == @seqlen")
    measured = measured.rename(columns={"median_ms": "ms"}).assign(source="measured")
    rows = []
    for name in model.backends("bfloat16", "forward"):
        case = Case(name, seqlen, batch=4, heads=16, dtype="bfloat16")
        found = analysis.predict(case, model)
        rows.append([name, "bfloat16", "predicted", "ok", found.ms, found.peak_memory_bytes])
    columns = ["backend", "dtype", "source", "status", "ms", "peak_memory_bytes"]
    return pd.concat([measured[columns], pd.DataFrame(rows, columns=columns)], ignore_index=True)


own_choose = checks.solution_or_reference(
    choose, checks.ex_4_5_choose.choose, checks.check_choice_limits, checks.check_choice_sources
)

# %% tags=["nbval-check-output"]
for n, limit in (
    (512, 4096),
    (1536, 4096),
    (4096, 4096),
    (12_288, 4096),
    (16_384, 4096),
    (16_384, 64),
):
    table = options(n)
    source = "measured" if (table.source == "measured").any() else "predicted"
    taken = own_choose(table, memory_bytes=limit * 2**20, dtype="bfloat16")
    print(f"{n:6} tokens, {limit:4} MiB: {taken}, {source}")

# %% [markdown]
# ![Time of each implementation over the fastest one, by length, on an H200: from 2K tokens on fa4 and cuDNN lead; below, the cost of a call from Python decides.](../theory/figures/field-choice.png)
#
# Compare with your guess. At 16,384 tokens the output alone has 128 MiB, so nothing fits into 64. At 1,536 the
# prediction prefers FlashAttention-4, although cuDNN was faster in the measurements at 1,024 and 2,048. The difference
# is smaller than the error of such predictions (section 4.6).
#
# `labsupport.analysis.recommend` does the same from a model, and gives its reasons. It also lists the candidates that a
# prediction cannot distinguish: measure those.

# %%
from labsupport.analysis.recommend import recommend

workload = Case(
    "any", 3072, batch=4, heads=16, dtype="bfloat16", causal=True, direction="forward+backward"
)
print(recommend(workload, model))

# %% [markdown]
# ### The guide
#
# *Which* implementation? Take the first row that you answer with yes ([chapter 10](../theory/10-field-guide.md#choose)
# has the reasons):
#
# ![Eleven questions from the top, the first yes decides: no GPU, an AMD GPU, old GPU, float32, a mask of your own, ALiBi, window, packed documents, dropout, decoding, Hopper or Blackwell; at the bottom remains sdpa_flash or fa2](../theory/figures/field-decision.png)
#
# And *how* to call it:
#
# | you choose | take | measured |
# | --- | --- | --- |
# | length | FlashAttention, unless sequences are short (some hundred tokens): there the launch counts, so batch, CUDA graphs, `torch.compile` | 4.5 |
# | dtype | bfloat16; float16 only where the range is known | notebooks 1 and 2 |
# | `head_dim` | 128 rather than 64 for speed; kernels end at 256 | below |
# | a causal mask | `causal=True`, never a mask tensor: it hides what could be skipped | below |
# | decoding | grouped heads, and a kernel that splits the keys among programs | below |
# | block sizes | leave them to the library, or tune | 4.3 |

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
print(f"A causal mask as a tensor takes {ratio.median:.1f} times as long as is_causal=True")

# %% tags=["nbval-check-output"]
peers = load_run("peers-h200")
by_dim = peers[(peers.direction == "forward") & ~peers.causal].set_index(["backend", "seqlen"])
rate = by_dim[by_dim.head_dim == 128].tflops / by_dim[by_dim.head_dim == 64].tflops
print("H200, FLOP rate, head_dim 128 over 64:", rate.groupby("backend").median().round(2).to_dict())
cuts = forward[forward.backend == "sdpa_cudnn"].pivot(
    index="seqlen", columns="causal", values="median_ms"
)
saves = (cuts[False] / cuts[True]).round(2).to_dict()
print("cuDNN, times as fast with a causal mask, by length:", saves)
decoded = load_run("decode-h200").query("batch == 1")
decoded["% of a copy's bandwidth"] = (100 * decoded.of_copy).round().astype(int)
print(decoded.pivot(index="implementation", columns="keys", values="% of a copy's bandwidth"))

# %% [markdown]
# **The usual traps**; you have met all of them:
#
# - timing without `synchronize`, or with the first call in it (4.1);
# - comparing dtypes instead of algorithms, or a mask with no mask (4.5);
# - FLOPs from a profiler that does not know the kernel (4.1);
# - judging a case by its bandwidth when arithmetic bounds it (4.2);
# - expecting a whole model to gain as much as attention alone (4.1; notebook 2, section 2.9);
# - believing that FlashAttention ran because its name was asked for (notebook 2);
# - testing a prediction on the rows that it was fitted to (4.6).

# %% [markdown]
# ## 4.9 · A fault to find
#
# *Further (optional), 12 minutes.* A colleague times calls on a GPU with an empty cache, as a new request would find
# it: before each call a "refill" kernel overwrites the cache. The results are odd: "Our new kernel is four times as
# fast by NVIDIA's counters, and my benchmark says not even twice."
#
# You use a virtual GPU here, so no real one is needed. `VirtualGpu` follows a real one's rules with a virtual
# clock: `launch` queues a kernel and returns after 0.01 ms, `synchronize` waits for everything in the queue, `now`
# reads the program's clock. The first call is compiled. A call that finds its data in the cache takes half as long.
#
# ### Exercise 4-6 · Find the fault
# ●●○ · 10 minutes · 0 points (optional)
#
# The next cell begins with the colleague's program. Run the table after it *first*. For some calls it shows the GPU's
# true work time and the time that the program measures, with 9 and with 99 repeats (one-time costs such as compiling
# would count for less with 99). Then name the cause and repair the program: `find_fault` returns the letter and a
# `median_ms` that is at most 0.01 ms (the launch) more than the call's work. (One line is enough.) The options:
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
# Subtract "one call works" from a measured column. What does the difference depend on, and what does it not depend on?
#
# <details><summary>Hint 2: the idea</summary>
#
# Draw the GPU's line above the program's line for one round of the loop: which kernels are queued, when does each run,
# and when is the clock read?
#
# <details><summary>Hint 3: an outline</summary>
#
# Two kernels are launched in a round, and only the second one may run between the two readings of the clock. What must the program do
# before the first reading?
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
cases = [(work, refill) for refill in (0.0, 1.2) for work in (0.4, 1.6, 6.4)]
pd.DataFrame(
    {
        "refill, ms": [refill for _, refill in cases],
        "one call works, ms": [work for work, _ in cases],
        "9 repeats, ms": [f"{median_ms(VirtualGpu(*case, 40), 9):.2f}" for case in cases],
        "99 repeats, ms": [f"{median_ms(VirtualGpu(*case, 40), 99):.2f}" for case in cases],
    }
)

# %% nbgrader={"grade": true, "grade_id": "ex-4-6-fault-clock", "locked": true, "points": 0, "schema_version": 3, "solution": false, "task": false}
checks.check_clock(after_repair)
### BEGIN HIDDEN TESTS
checks.check_clock(after_repair, seed=46)
### END HIDDEN TESTS

# %% [markdown]
# ## What you measured
#
# - A profiler shows how much of textbook attention's time goes to the softmax, which has hardly any FLOPs. It cannot see inside
#   a fused kernel.
# - Long texts are bound by arithmetic, decode steps by bandwidth. The textbook's intensity stays the same while $N$ grows.
# - Traffic is $N^2 d^2 / M$: quadratic, with a small constant. HBM sees each tensor about once, because L2 catches the rest.
# - The kernel's core is a few lines. Tiles, resources and overlap decide its speed.
# - Two numbers predict a fused kernel within some percent, if nothing else changes; a term for the diagonal is missing. Held-out
#   rows show this, fitted ones would not.
# - The best implementation depends on length, dtype, mask and device. Choose by a table of measurements and a rule for ties.
#
# ### Three questions
#
# <details><summary>1. A kernel's report says: bandwidth 12%, tensor pipe 60%. A colleague wants to "improve memory access". What do you say?</summary>
#
# First, ask what bounds the case. At that intensity it is arithmetic, and memory could deliver eight times as much. The
# tensor cores are idle 40% of the time: they wait for exponentials, for rescaling, for synchronisation. So work on the
# overlap. </details>
#
# <details><summary>2. Somebody doubles head_dim and halves the number of heads. FLOPs, compulsory bytes, traffic to the multiprocessors: what changes?</summary>
#
# FLOPs and compulsory bytes stay (except $L$, which has half as many numbers). The traffic $N^2 d^2 / M$ of each head
# quadruples, for half as many heads: twice as much in all. Exponentials halve ($N^2$ for each head), so kernels often
# get *faster* while L2 can supply the data. </details>
#
# <details><summary>3. A model of time was fitted on 20 shapes, and its mean error on them is 2%. What do you ask before you use it?</summary>
#
# Ask for its error on shapes that it has not seen, and how those differ: length, mask, batch, head dimension. Ask
# whether the test varied everything that will vary in use. And ask for its interval: without one, no measurement can
# contradict the prediction. </details>
#
# ### Read on
#
# - Theory chapters [4](../theory/04-io-complexity.md), [8, Performance model](../theory/08-performance-model.md), and
#   [10, Field guide](../theory/10-field-guide.md): choosing, installing, troubleshooting, renting a GPU.
# - Williams, Waterman and Patterson, *Roofline* (2009), <https://doi.org/10.1145/1498765.1498785>.
# - Dao et al., *FlashAttention* (arXiv 2205.14135), section 3.2 and theorem 2; Dao, *FlashAttention-2* (arXiv 2307.08691), sections 3.2 and 3.3;
#   Shah et al., *FlashAttention-3* (arXiv 2407.08608), for the overlap that Triton lacks.
# - Kernels, from the simplest to the fastest. This lab: `labsupport/attention/flash_torch.py`, then `kernels/template.py`,
#   `forward.py`, `backward.py`, `hopper.py`. Dao-AILab/flash-attention: `csrc/flash_attn/src` is version 2 in CUDA C++ with
#   CUTLASS (`flash_fwd_kernel.h` the forward, `flash_bwd_kernel.h` the backward), `hopper/` is version 3, `flash_attn/cute/` version
#   4, in Python. PyTorch: `aten/src/ATen/native/cpu/FlashAttentionKernel.cpp` is the one that ran here on a CPU.
# - NVIDIA's CUTLASS, and CuTe in it, whose documentation explains the layouts that you meet in those files.
# - [FlashAttention-4](further/flashattention-4.ipynb), with exercise 4-7, and [reading a profile](further/profiles.ipynb),
#   with exercise 4-8.
# - To try: `trace` on a step of your own program, and `labsupport compare` on the next GPU that you get hold of.
#
# **The end of the lab.** 28 + 24 + 24 + 24 points, if all checks say `[ok]`. You began with three lines that needed
# $N^2$ numbers. Since then you have written the algorithm, put it into a model, trained with it on long texts, spread
# it over devices, and predicted its times. Now use it in a project of your own; if it is slow, you know where to look.

# %% [markdown]
# ### How far you are
#
# The checks run once more, on the definitions in this notebook. (`labsupport progress`, in a terminal, reads the saved
# notebooks.)

# %%
from labsupport.course.progress import show_progress

show_progress("04", globals())
