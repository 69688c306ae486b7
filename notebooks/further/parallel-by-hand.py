# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Parallel by hand: zigzag, DDP and FSDP
#
# **Time** about 57 minutes (estimated). **You need** notebook 3, sections 3.8 to 3.12.
# **Exercises** 3-5 and 3-6, 10 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [11, Several devices](../../theory/11-several-devices.md#other-data-on-each-device-ddp).

# %%
import pandas as pd
import torch

from labsupport import checks
from labsupport.attention import standard_attention
from labsupport.distributed import cleanup_ddp, positions_of, setup_ddp, unshard_sequence
from labsupport.distributed.by_hand import (
    gradients_on_rank,
    layer_memory,
    layer_on_rank,
    rehearse,
    train_on_rank,
)
from labsupport.distributed.launch import launch
from labsupport.profiling import environment_card

torch.manual_seed(0)
environment_card()


# %% [markdown]
# ## The zigzag order
#
# Causal attention gives late queries more work than early ones. So *zigzag* cuts the sequence into `2 * world` chunks, and
# gives each rank an early one and a late one. With four ranks:
#
# ```text
# contiguous   rank 0: 0 1              zigzag   rank 0: 0             7
#              rank 1:     2 3                   rank 1:   1         6
#              rank 2:         4 5               rank 2:     2     5
#              rank 3:             6 7           rank 3:       3 4
# ```
#
# ## Exercise 3-5 · Zigzag order
# ●○○ · 7 minutes · 4 bonus points
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
# Which two chunks belong to rank 0? What is the sum of the two numbers of each rank?
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
# Four ranks with your order, each with its own queries and, here, all keys. Together they give the attention of one
# device, and each has the same number of visible pairs of query and key:

# %% tags=["nbval-check-output"]
own_positions = checks.solution_or_reference(
    zigzag_positions,
    lambda seqlen, rank, world: positions_of(seqlen // world, rank, world, zigzag=True),
    checks.check_zigzag_positions,
)
own_unzigzag = checks.solution_or_reference(
    unzigzag, lambda shards: unshard_sequence(shards, zigzag=True), checks.check_unzigzag
)
whole = torch.randn(3, 2, 64, 16, generator=torch.Generator().manual_seed(0))
exact, _ = standard_attention(*whole, causal=True)
shards, work = [], []
for rank in range(4):
    local = own_positions(64, rank, 4)
    visible = local[:, None] >= torch.arange(64)
    shards.append(standard_attention(whole[0][:, local], *whole[1:], mask=visible)[0])
    work.append(int(visible.sum()))
found = own_unzigzag(shards)
print(f"as on one device: {bool((found - exact).abs().max() < 2e-6)}; pairs of each rank: {work}")


# %% [markdown]
# ## Data parallelism
#
# What does DDP do between your backward pass and your optimizer? What does FSDP do
# around each layer? Write both. Each rank communicates through an object `comm`: `comm.world` is the number of ranks, and
# there are three operations:
#
# | | starts | returns |
# | --- | --- | --- |
# | `comm.all_reduce(x)` | adding up `x` over all ranks, in place | a function: call it to wait until `x` is the sum |
# | `comm.all_gather(shard)` | | the shards of all ranks, concatenated along the rows |
# | `comm.reduce_scatter(whole)` | | this rank's rows of the sum of `whole` over all ranks |
#
# First you *rehearse*: each rank is a thread of this process. That takes milliseconds, and a mistake that would make
# real processes hang gives an error here. Then the same functions run on real processes.
#
# ![A backward pass of four layers. In step 1 each layer's gradient is sent when it is complete, and the pass waits. In step 3 two buckets, of layers 4 and 3 and of layers 2 and 1, travel while the pass continues.](../../theory/figures/gradient-buckets.png)
#
# ## Exercise 3-6 · Data parallelism by hand
# ●●● · 43 minutes · 6 bonus points
#
# ### Step 1 · A hook for each parameter · 8 minutes
#
# `average_each(parameters, comm, is_last)` attaches a hook to each parameter. The hook replaces the gradient by its
# mean over all ranks. `p.register_post_accumulate_grad_hook(function)` makes PyTorch call `function(p)` when `p.grad`
# is complete, once per backward pass. With several micro-batches before an update, PyTorch adds up their gradients in
# `p.grad`. `is_last()` is true in the backward pass of the last micro-batch: send the gradient only then. (DDP's
# `no_sync` does the same.)
#
# <details><summary>Hint 1: a nudge</summary>
#
# When the hook is called, what is in `p.grad` on rank 0, and what on rank 1? Which number do both ranks need?
#
# <details><summary>Hint 2: the idea</summary>
#
# `comm.all_reduce(p.grad)` returns immediately, with a function. `p.grad` is the sum only after you have called that function. And a
# sum is not yet a mean.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# inner function of one parameter:   if this is the last micro-batch:
#                                        start the all-reduce of its gradient, wait, divide in place by the number of ranks
# for all parameters:                register the inner function
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-6-hooks", "locked": false, "schema_version": 3, "solution": true, "task": false}
def average_each(parameters, comm, is_last):
    """Attach a hook to each parameter that averages its gradient over the ranks."""

    ### BEGIN SOLUTION
    def average(p):
        if is_last():
            comm.all_reduce(p.grad)()
            p.grad /= comm.world

    for p in parameters:
        p.register_post_accumulate_grad_hook(average)
    ### END SOLUTION


def rehearse_each(weights, inputs):
    """The gradients and the traffic of each rank, with `average_each`."""
    return rehearse(
        lambda comm: gradients_on_rank(average_each, comm, weights, inputs), len(inputs)
    )


# %% nbgrader={"grade": true, "grade_id": "ex-3-6-hooks-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_average_each(average_each)
### BEGIN HIDDEN TESTS
checks.check_average_each(average_each, seed=61)
### END HIDDEN TESTS

# %% [markdown]
# ### Step 2 · Which gradients share a bucket? · 8 minutes
#
# A model has hundreds of small tensors, and each all-reduce has a latency. So DDP collects gradients in *buckets*.
# `make_buckets(sizes, cap)` takes the sizes of the parameters in bytes, in the model's order, and returns a list of
# lists: the indices of the parameters in each bucket. The backward pass reaches the last parameter first, so the
# first bucket starts with the last index. A bucket is full when it contains `cap` bytes or more; the next tensor
# starts a new bucket. (This is DDP's rule. A large tensor can make a bucket much larger than `cap`.) For example,
# with `sizes = [400, 300, 200, 100]` and `cap = 300`:
#
# ```text
# 3: 100 bytes, 2: 300 bytes, full   |   1: 300 bytes, full   |   0: 400 bytes        [[3, 2], [1], [0]]
# ```
#
# <details><summary>Hint 1: a nudge</summary>
#
# Do you test whether a bucket is full before or after you add a tensor to it? When do you need the next bucket?
#
# <details><summary>Hint 2: the idea</summary>
#
# Use one loop from the last index to 0. Keep two things: the list of buckets, and the number of bytes in the last of them.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# start with one empty bucket and 0 bytes
# for each index, from the last to the first:
#     if the bytes have reached cap:   start an empty bucket, with 0 bytes
#     append the index to the last bucket, add its size to the bytes
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-6-buckets", "locked": false, "schema_version": 3, "solution": true, "task": false}
def make_buckets(sizes, cap):
    """The numbers of the parameters in each bucket, in the order in which gradients come."""
    ### BEGIN SOLUTION
    buckets, filled = [[]], 0
    for i in reversed(range(len(sizes))):
        if filled >= cap:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += sizes[i]
    return buckets
    ### END SOLUTION


# %% nbgrader={"grade": true, "grade_id": "ex-3-6-buckets-cut", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_buckets(make_buckets)
### BEGIN HIDDEN TESTS
checks.check_buckets(make_buckets, seed=62)
### END HIDDEN TESTS

# %% [markdown]
# ### Step 3 · Buckets that travel during the backward pass · 15 minutes
#
# `average_in_buckets(parameters, buckets, comm, is_last)` attaches hooks, too. The hook that completes a bucket
# concatenates the bucket's gradients into one flat tensor and starts the all-reduce, *without* waiting.
# `average_in_buckets` returns a function, `finish`, which is called after the last backward pass of each step. It
# waits for all buckets, divides, and copies each part back into the gradient of its parameter. The hooks stay for the
# next step.
#
# <details><summary>Hint 1: a nudge</summary>
#
# A hook knows only its own parameter. What must the hooks of a bucket share, to know when it is complete?
#
# <details><summary>Hint 2: the idea</summary>
#
# For each bucket, count down the number of missing gradients. At 0, concatenate the flattened gradients with
# `torch.cat`, start the all-reduce, and append the flat tensor and its wait function to a list. A `lambda` in a loop
# sees the *last* value of the loop variable `n`; `lambda p, n=n: ...` keeps the current value.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# missing = for each bucket, its number of gradients;   running = an empty list
# arrived(n):    return, if this is not the last micro-batch
#                missing[n] is one less;   if it is 0: flatten, concatenate, start; append (bucket, flat, wait) to running
# hooks:         for each bucket n, for each of its parameters: one that calls arrived(n)
# finish():      for each entry of running: wait, split flat by the parameters' sizes;  divide each part by world,
#                copy it back in its shape
#                then empty running and reset missing, both in place
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-6-overlap", "locked": false, "schema_version": 3, "solution": true, "task": false}
def average_in_buckets(parameters, buckets, comm, is_last):
    """Attach hooks that send full buckets; return what waits for them and stores the means."""
    ### BEGIN SOLUTION
    missing, running = [len(bucket) for bucket in buckets], []

    def arrived(number):
        if not is_last():
            return
        missing[number] -= 1
        if missing[number] == 0:
            own = [parameters[i] for i in buckets[number]]
            flat = torch.cat([p.grad.flatten() for p in own])
            running.append((own, flat, comm.all_reduce(flat)))

    for number, bucket in enumerate(buckets):
        for i in bucket:
            parameters[i].register_post_accumulate_grad_hook(lambda _, n=number: arrived(n))

    def finish():
        for own, flat, wait in running:
            wait()
            parts = flat.split([p.numel() for p in own])
            for p, part in zip(own, parts, strict=True):
                p.grad.copy_(part.view_as(p) / comm.world)
        running.clear()
        missing[:] = [len(bucket) for bucket in buckets]

    return finish
    ### END SOLUTION


def rehearse_buckets(weights, inputs, buckets):
    """The gradients and the traffic of each rank, with `average_in_buckets`."""

    def attach(parameters, comm, is_last):
        return average_in_buckets(parameters, buckets, comm, is_last)

    return rehearse(lambda comm: gradients_on_rank(attach, comm, weights, inputs), len(inputs))


# %% nbgrader={"grade": true, "grade_id": "ex-3-6-overlap-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_average_in_buckets(average_in_buckets)
### BEGIN HIDDEN TESTS
checks.check_average_in_buckets(average_in_buckets, seed=63)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-6-overlap-order", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_overlap(average_in_buckets)
### BEGIN HIDDEN TESTS
checks.check_overlap(average_in_buckets, seed=64)
### END HIDDEN TESTS

# %% [markdown]
# ### Step 4 · A layer in parts, as FSDP does it · 12 minutes
#
# Under DDP, each rank stores all weights. Under FSDP, it stores only some rows of each weight, its *shard*. The whole weight is
# gathered shortly before it is needed, and freed afterwards.
#
# ![One layer on one of two ranks: its shard is always there, the whole weight only during the forward and the backward pass, and only a shard of the whole gradient remains.](../../theory/figures/sharded-layer.png)
#
# Write this for one layer, `y = x Wᵀ`, as an autograd function.
#
# | | gets | returns |
# | --- | --- | --- |
# | `forward(ctx, x, shard, comm)` | `x` `(rows, in)`, this rank's inputs; `shard` `(out / world, in)` | `y` `(rows, out)` |
# | `backward(ctx, dy)` | `dy` `(rows, out)` | the gradients of `x` and `shard`, and None for `comm` |
#
# The gradient of `shard` is the mean over all ranks, as under DDP, but only for this rank's rows. The whole weight must not stay in
# memory after `forward`: gather it again in `backward`. You need $dX = dY\,W$ and $dW = dY^\top X$.
#
# <details><summary>Hint 1: a nudge</summary>
#
# Which of `x`, `shard` and the whole weight may you store in `ctx`? Each rank can compute the whole $dW$ for *its own* inputs. Which
# ranks need which rows of it?
#
# <details><summary>Hint 2: the idea</summary>
#
# `reduce_scatter` is the mirror image of `all_gather`. `all_gather` gives all rows to all ranks. `reduce_scatter` adds
# up the rows of all ranks and gives each rank its own part. First `reduce_scatter`, then `all_gather`: together they
# are an all-reduce.
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# forward     save x and shard;  ctx.comm = comm;  gather the shards, multiply
# backward    gather again for dx;  dW of this rank's inputs;  reduce-scatter it, divide by the number of ranks
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-6-shard", "locked": false, "schema_version": 3, "solution": true, "task": false}
class ShardedLinear(torch.autograd.Function):
    """A linear layer of which each rank holds some rows."""

    @staticmethod
    def forward(ctx, x, shard, comm):
        """y, of this rank's inputs."""
        ### BEGIN SOLUTION
        ctx.save_for_backward(x, shard)
        ctx.comm = comm
        weight = comm.all_gather(shard)
        return x @ weight.mT
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy):
        """The gradients of x and of the shard; None for comm."""
        ### BEGIN SOLUTION
        x, shard = ctx.saved_tensors
        weight = ctx.comm.all_gather(shard)
        dx = dy @ weight
        dweight = dy.mT @ x
        return dx, ctx.comm.reduce_scatter(dweight) / ctx.comm.world, None
        ### END SOLUTION


def rehearse_layer(weight, inputs, douts):
    """Results, gradients, memory and traffic of each rank, with `ShardedLinear`."""
    return rehearse(
        lambda comm: layer_on_rank(ShardedLinear, comm, weight, inputs, douts), len(inputs)
    )


# %% nbgrader={"grade": true, "grade_id": "ex-3-6-shard-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_sharded_layer(ShardedLinear)
### BEGIN HIDDEN TESTS
checks.check_sharded_layer(ShardedLinear, seed=65)
### END HIDDEN TESTS

# %% nbgrader={"grade": true, "grade_id": "ex-3-6-shard-memory", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_sharded_memory(ShardedLinear)
### BEGIN HIDDEN TESTS
checks.check_sharded_memory(ShardedLinear, seed=66)
### END HIDDEN TESTS

# %% [markdown]
# Now train a small network on two real processes, for 20 steps with two micro-batches before each update. Each rank
# has its own part of the data (`DistributedSampler`). We train once with PyTorch's `DistributedDataParallel`, once
# with your hooks, and once with your buckets. The tensors of the network have 32,768, 512, 65,536, 512, 8,192 and 64
# bytes, in the model's order.
#
# **Predict first**: how many all-reduces does a step take with buckets of 32 KiB (32,768 bytes)?

# %%
predicted_buckets = None  # your guess, a number

# %%
own_hooks = checks.solution_or_reference(
    average_each,
    checks.ex_3_6_data_parallel.average_each,
    checks.check_average_each,
)
own_cut = checks.solution_or_reference(
    make_buckets, checks.ex_3_6_data_parallel.make_buckets, checks.check_buckets
)
own_buckets = checks.solution_or_reference(
    average_in_buckets,
    checks.ex_3_6_data_parallel.average_in_buckets,
    checks.check_average_in_buckets,
)
own_layer = checks.solution_or_reference(
    ShardedLinear,
    checks.ex_3_6_data_parallel.ShardedLinear,
    checks.check_sharded_layer,
)


def attach_buckets(parameters, comm, is_last):
    """Your two functions together."""
    buckets = own_cut([p.nbytes for p in parameters], 2**15)
    return own_buckets(parameters, buckets, comm, is_last)


def train_three_ways():
    """On one rank: DDP, hooks, buckets; and the memory of whole and sharded layers."""
    setup_ddp("gloo")
    trained = [train_on_rank(attach) for attach in (None, own_hooks, attach_buckets)]
    memory = layer_memory(own_layer)
    cleanup_ddp()
    return trained, memory


both = launch(train_three_ways, processes=2, device="cpu")  # some seconds

# %% tags=["nbval-check-output"]
ddp, *by_hand = trained = both[0][0]
checks.compare_prediction("All-reduces of a step", predicted_buckets, ddp["all_reduces"])
for run in by_hand:
    pairs = zip(run["parameters"], ddp["parameters"], strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-6
index = ["DistributedDataParallel", "your hooks", "your buckets"]
pd.DataFrame(trained, index=index)[["all_reduces", "bytes"]]

# %% [markdown]
# After 20 steps the weights agree to $10^{-6}$. The buckets send the same bytes in fewer messages. Now measure the
# memory of four sharded layers of 1,024 × 1,024:

# %%
held = pd.DataFrame(both[0][1] + both[1][1]).set_index(["rank", "weights"]) / 2**20
held.rename(columns={"held_bytes": "held, MiB", "gathered_bytes": "gathered, at most, MiB"}).round(
    1
)

# %% [markdown]
# Each rank stores half of the weights and gradients. In return, each pass gathers one whole weight at a time, 4 MiB.
# (In the backward pass, the whole gradient of the layer takes another 4 MiB until the reduce-scatter; the table leaves
# these 4 MiB out.) In a model with a hundred layers, one whole layer is small compared with what you save.
#
# `capstone/data_parallel.py` is an ordinary program of about a hundred lines with DDP and FSDP. Read it, run it with
# `torchrun --nproc-per-node 2 capstone/data_parallel.py`, and try your own hooks in it.
