# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A ring's backward
#
# **Time** about 23 minutes. **You need** notebook 3 up to section 3.11, and exercise 1-5 of [backward](backward.ipynb).
# **Exercise** 3-7, 1 bonus point, beside the 100 of the four notebooks. **Theory** chapter
# [11, Several devices](../../theory/11-several-devices.md#a-ring-backward).

# %%
import torch

from labsupport import checks
from labsupport.distributed import cleanup_ddp, setup_ddp
from labsupport.distributed.by_hand import ProcessComm, rehearse
from labsupport.distributed.launch import launch
from labsupport.profiling import environment_card

torch.manual_seed(0)
environment_card()


# %% [markdown]
# The ring of notebook 3, section 3.11 has only a forward pass. The backward pass sends keys and
# values around once more, together with the gradients of K and V (notebook 3, section 3.9). After how many steps are these
# gradients back on their own rank?
#
# ![Whose keys each of four ranks has in each of four steps: rank r has those of rank r minus the step. If these keys come from a later rank, the mask hides them.](../../theory/figures/ring-steps.png)
#
# ## Exercise 3-7 · A ring's backward
# ●●● · 20 minutes · 1 bonus point
#
# Shards are contiguous, and attention is causal. `ring_backward` gets this rank's shards: `dout`, `q`, `k`, `v`, `out`
# `(heads, tokens, head_dim)`, and `lse` `(heads, tokens)`, the log-sum-exp $L$ of the *whole* rows. It returns `dq`,
# `dk` and `dv`, the gradients of this rank's `q`, `k` and `v`. One block contributes as in exercise 1-5.
# Its scores are $S = QK^\top / \sqrt d$, and $D$ contains the row sums of $dO \circ O$:
#
# $$P = e^{S - L}, \quad dS = P \circ (dO\,V^\top - D), \quad dQ \mathrel{+}= dS\,K / \sqrt d, \quad dK \mathrel{+}= dS^\top Q / \sqrt d, \quad dV \mathrel{+}= P^\top dO$$
#
# `comm.send_on((k, v))` starts sending keys and values to the next rank, and returns a function. Call that function to
# get the pair of the previous rank. Before this call, don't change k and v in place. `comm.rank` is the number of this
# rank, from 0, and `comm.world` the number of ranks. All ranks must send equally often, even in steps in which the
# mask hides all the keys that they have.
#
# <details><summary>Hint 1: a nudge</summary>
#
# dQ is a sum over keys, dK a sum over queries. Which of the two sums can a rank compute without sending it anywhere?
#
# <details><summary>Hint 2: the idea</summary>
#
# At any time, the dK and dV on a rank are those of the keys on that rank. So send them on with the keys, after you
# have added your contribution. They start as zeros on their own rank. After how many hops (messages to the next rank)
# are they back on it?
#
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# D, and zeros for dq, dk, dv
# for each step, 0 to world - 1:
#     start sending k and v
#     if their owner's tokens are not later than ours (step <= rank):
#         S, in step 0 masked above its diagonal;  P, dS;  add this block's contributions to dq, dk, dv
#     send dk and dv on, and take those of the previous rank
#     take k and v of the previous rank
# ```
# </details>
# </details>
# </details>


# %% nbgrader={"grade": false, "grade_id": "ex-3-7-ring-backward", "locked": false, "schema_version": 3, "solution": true, "task": false}
def ring_backward(dout, q, k, v, out, lse, comm):
    """The gradients of this rank's q, k and v."""
    ### BEGIN SOLUTION
    scale = q.shape[-1] ** -0.5
    delta = (dout * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for step in range(comm.world):
        arriving = comm.send_on((k, v))
        if step <= comm.rank:
            scores = scale * q @ k.mT
            if step == 0:
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            p = (scores - lse[..., None]).exp()
            ds = scale * p * (dout @ v.mT - delta)
            dq, dk, dv = dq + ds @ k, dk + ds.mT @ q, dv + p.mT @ dout
        dk, dv = comm.send_on((dk, dv))()
        k, v = arriving()
    return dq, dk, dv
    ### END SOLUTION


def rehearse_ring(*shards):
    """Each rank's gradients; shards of all ranks of dout, q, k, v, out and lse."""
    return rehearse(
        lambda comm: ring_backward(*(x[comm.rank] for x in shards), comm), len(shards[0])
    )


# %% nbgrader={"grade": true, "grade_id": "ex-3-7-ring-backward-values", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
checks.check_ring_backward(ring_backward)
### BEGIN HIDDEN TESTS
checks.check_ring_backward(ring_backward, seed=71)
### END HIDDEN TESTS

# %% [markdown]
# In the check each rank was a thread of this process. Now run it on three real processes, with the same check:

# %%
own_backward = checks.solution_or_reference(
    ring_backward,
    checks.ex_3_7_ring_backward.ring_backward,
    checks.check_ring_backward,
)


def ring_on_processes(backward, *shards):
    """The same as `rehearse_ring`, with a process for each rank."""

    def on_this_rank():
        info = setup_ddp("gloo")
        found = backward(*(x[info.rank] for x in shards), ProcessComm())
        cleanup_ddp()
        return found

    return launch(on_this_rank, processes=len(shards[0]), device="cpu")


checks.check_ring_backward(own_backward, worlds=(3,), run=ring_on_processes)

# %% [markdown]
# Together with your forward pass of notebook 3, section 3.11, this is a complete ring with gradients.
# `labsupport/distributed/minimal_ring.py` puts both into one autograd function of 60 lines.
