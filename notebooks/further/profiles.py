# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a profile
#
# **Time** about 25 minutes (estimated). **You need** notebook 4, section 4.1.
# **Exercise** 4-8, 2 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [8, Performance model](../../theory/08-performance-model.md#reading-a-kernels-counters).

# %%
import math
import tempfile
from pathlib import Path

import pandas as pd
import torch

from labsupport import checks, plotting
from labsupport.profiling import environment_card, load_run

torch.manual_seed(0)
environment_card()

# %% [markdown]
# ## A whole step
#
# First a training step (forward, backward, AdamW) of the small decoder of notebook 3, with textbook attention and with
# FlashAttention. The rows are attention, the layers' matrix products, and the rest.

# %%
from labsupport.profiling.trace import trace
from labsupport.training import DecoderConfig, MemoryOptions
from labsupport.training.measure import MemoryStrategy, training_step

gpu = torch.cuda.is_available()
tokens = 8192 if gpu else 1024


def kind(row):
    # The textbook's two products are batched ones, of all heads; layers have plain ones.
    if any(word in row.operator for word in ("attention", "softmax", "bmm", "masked_fill")):
        return "attention"
    return "layers' products" if "mm" in row.operator else "all the rest"


steps = {}
for name, backend in {"standard": "standard", "flash": "auto"}.items():
    options = MemoryOptions(attention=backend)
    strategy = MemoryStrategy(name, options, autocast=torch.bfloat16 if gpu else None)
    device = torch.device("cuda" if gpu else "cpu")
    step = training_step(DecoderConfig.preset("tiny"), strategy, tokens, device)
    tries = [trace(step.run, count_bytes=False) for _ in range(3)]
    steps[name] = min(tries, key=lambda seen: seen.wall_ms)  # the one that was disturbed least
by_kind = {
    name: (rows := seen.kernels()).groupby(rows.apply(kind, axis=1)).device_ms.sum()
    for name, seen in steps.items()
}
pd.DataFrame(by_kind).rename_axis("ms on the device").round(1)

# %% [markdown]
# On a quiet machine the step with FlashAttention is shorter, and the parts outside attention take a larger share. (If your
# table differs, another program was using the cores: run the cell again.) *All the rest* shrinks too, because in the
# textbook's step it includes scaling, masking and copying of $N \times N$ numbers. The profiler cannot assign these
# operators to attention.
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
#
# ## Gaps and waiting warps
#
# Before you change a slow program, ask two questions. Does the GPU wait for the
# program? Then a faster kernel is of no use. If not, what do the warps of the kernel wait for? A *trace* of PyTorch's
# profiler answers the first question, a report of Nsight Compute the second. Both were recorded on an H100.
#
# Python launches one kernel after the other, and each launch takes the CPU some microseconds. If a kernel ends
# before the next one is launched, the GPU waits: this is a *launch gap*. Kernels on different *streams* may run at
# the same time, for example a product and a copy of the next inputs.
#
# ### Exercise 4-8 · Gaps and stalls
# ●●○ · useful · 20 minutes · 2 bonus points
#
# | function | takes | returns |
# | --- | --- | --- |
# | `launch_gap(trace)` | a DataFrame: a row for each kernel or copy, in any order, with `start_us`, `duration_us`, `name`, `stream` | the share of the time from the first start to the last end in which no stream runs anything |
# | `stall(report, kernel)` | a DataFrame: a row for each launch and reason, with `launch`, `kernel`, `reason`, `cycles`; a kernel's full name | the reason for which this kernel's warps wait longest, and its share of all their waiting |
#
# `cycles` is the average time that a warp waited for this reason between two instructions. `"selected"` is not a wait: in this
# cycle the warp issues an instruction. `"not_selected"` *is* a wait. If a kernel has several launches, average each reason's
# cycles over them; a launch without a row for a reason did not measure it, so average over the others. Leave both DataFrames
# as they are.
#
# <details><summary>Hint 1: a nudge</summary>
#
# A copy runs from 10 to 70 µs, and two kernels from 30 to 35 and from 40 to 50. For how long does something run? Why is the sum of the
# durations wrong, and why is the end of the last row not the end of the time?
#
# <details><summary>Hint 2: the idea</summary>
#
# Sort by `start_us`, and go through the rows with the latest end so far. How much of a row lies after that end? For `stall`, `groupby("reason")`
# gives each reason's mean, and `idxmax` the name of the largest.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# launch_gap   latest = before everything; busy = 0
#              for each row, by start:  busy += what lies after both its start and latest, at least 0
#                                       latest = the later one of latest and its end
#              1 - busy / (latest - first start)
# stall        rows of this kernel, without "selected"; mean of each reason
#              the largest one's name; the largest over the sum
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-4-8-profile", "locked": false, "schema_version": 3, "solution": true, "task": false}
def launch_gap(trace):
    """The share of the time in which no stream works."""
    ### BEGIN SOLUTION
    rows = trace.sort_values("start_us")
    first, busy, end = rows["start_us"].min(), 0.0, -math.inf
    for start, duration in zip(rows["start_us"], rows["duration_us"], strict=True):
        stop = start + duration
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - first)
    ### END SOLUTION


def stall(report, kernel):
    """The top stall reason of a kernel, and its share of the waiting."""
    ### BEGIN SOLUTION
    own = report[report["kernel"] == kernel]
    waits = own[own["reason"] != "selected"].groupby("reason")["cycles"].mean()
    return str(waits.idxmax()), float(waits.max() / waits.sum())
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-4-8-profile-gap", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_launch_gap(launch_gap)
### BEGIN HIDDEN TESTS
checks.check_launch_gap(launch_gap, seed=48)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-4-8-profile-stall", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_stall(stall)
### BEGIN HIDDEN TESTS
checks.check_stall(stall, seed=49)
### END HIDDEN TESTS

# %% [markdown]
# The recorded trace has calls with 256 and with 8,192 tokens (16 heads of 64, bfloat16): the textbook's four kernels, the
# same as a CUDA graph, the textbook beside a copy of the next inputs, and PyTorch's FlashAttention. **Predict first**:
# for what share of the time does the GPU wait in the textbook's calls with 256 tokens?

# %%
predicted_waiting = None  # your guess, a number between 0 and 1

# %%
own_gap = checks.solution_or_reference(
    launch_gap, checks.ex_4_8_profile.launch_gap, checks.check_launch_gap
)
own_stall = checks.solution_or_reference(stall, checks.ex_4_8_profile.stall, checks.check_stall)
timeline = load_run("trace-h100").query("status == 'ok'")
waiting = {key: own_gap(rows) for key, rows in timeline.groupby(["call", "tokens"], sort=False)}
checks.compare_prediction(
    "Waiting, textbook, 256 tokens", predicted_waiting, waiting["textbook", 256], possible=(0, 1)
)
pd.Series(waiting).unstack().rename_axis(columns="GPU waits, with tokens").map("{:.0%}".format)

# %%
plotting.plot_launches(
    timeline[timeline.tokens == 256],
    title=f"256 tokens: the GPU waits {waiting['textbook', 256]:.0%} of the time, "
    f"in a CUDA graph {waiting['textbook, CUDA graph', 256]:.0%}",
    small_print="recorded: NVIDIA H100, five calls each; dark: the main stream, light: copies",
)

# %% [markdown]
# A short call is as slow as its launches, whatever the kernels do. FlashAttention launches one kernel where the
# textbook launches four: it takes less time, but the GPU still waits between its calls. A CUDA graph launches all four
# together; then most of what remains lies between the calls. Larger batches help, too, and `torch.compile` can do all
# three. A copy on a
# separate stream fills gaps only if the program launches it early enough. Here it is too late: the kernels wait for the
# copies, and five calls take three times as long. The waiting *share* falls only because copies count as work. With
# 8,192 tokens each kernel takes longer
# than the next launch: the CPU is always ahead, and only a faster kernel helps. So look inside, at 4,096 tokens:

# %%
report = load_run("stalls-h100").query("status == 'ok'")
passes = ("QKᵀ", "scale", "softmax", "PV")
rows = [
    (backend, passes[n] if backend == "standard" else "all", *own_stall(own, own.kernel.iloc[0]))
    for (backend, n), own in report.groupby(["backend", "launch"], sort=False)
]
stalls = pd.DataFrame(rows, columns=["backend", "kernel for", "waits most for", "share"])
stalls.set_index("backend").assign(share=stalls.share.map("{:.0%}".format).to_numpy())

# %% [markdown]
# | reason | a warp waits |
# | --- | --- |
# | `long_scoreboard` | for data from L2 or HBM: the kernel is short of bandwidth, or loads too late |
# | `short_scoreboard`, `mio_throttle` | for shared memory, or for exponentials |
# | `math_pipe_throttle`, `gmma` | for tensor cores that are busy, which is good |
# | `wait` | a fixed number of cycles, for the instruction before: normal in dense arithmetic |
# | `barrier` | for other warps of its program |
# | `not_selected` | for its turn: it is ready, but so is another warp |
#
# The textbook's two products and its scaling wait for memory: they are bound by the $N \times N$ numbers that they write or read, and
# their tensor cores idle. A third of the softmax's waiting is for its turn: usually some warp is ready. In PyTorch's
# FlashAttention (`sdpa_flash`) the largest share is `wait`, the latency of instructions that depend on each other, as
# in any dense arithmetic. The lab's Triton kernel has no such peak: its largest share, little more than
# a quarter, is waiting for loads. [Chapter 8](../../theory/08-performance-model.md#reading-a-kernels-counters) reads a report further.
