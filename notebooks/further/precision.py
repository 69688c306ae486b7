# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which dtype on which device
#
# **Time** about 32 minutes. **You need** notebook 2, section 2.10.
# **Exercise** 2-5, 4 bonus points, beside the 100 of the four notebooks. **Theory** chapter
# [6, Precision](../../theory/06-precision.md#mixed-precision-training).

# %%
import torch
import transformers

from labsupport import checks, models, plotting
from labsupport.precision import FlashAttentionConfig, apply_precision_policy
from labsupport.profiling import environment_card

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
environment_card()

# %% [markdown]
# Half precision halves the weights, and a decode step waits for the weights. But float16 cannot hold numbers from
# 65,520 on. Does that matter in practice? Look at the *residual stream* of SmolLM2, the sum that runs through all layers
# and to which each adds its part:

# %%
smollm2 = models.load_model("smollm2", attention="flash", dtype=torch.float32, device=device)
model = smollm2.model
ids = models.tokens_of(smollm2.tokenizer, models.source_text("argparse"), 512).to(device)
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
FlashAttentionConfig()


# %% [markdown]
# ## Exercise 2-5 · A precision policy for inference
# ●●○ · 20 minutes · 4 bonus points
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
# Your policy for this device now runs the real model. Guess: by how much does the NLL change, from float32's 2.50 nats a
# token?

# %%
predicted_change = None  # your guess, in nats a token

# %%
import copy

own_policy = checks.solution_or_reference(
    my_policy,
    lambda device_type, capability: FlashAttentionConfig(),
    checks.check_policy_devices,
    checks.check_policy_range,
)
capability = torch.cuda.get_device_capability() if device.type == "cuda" else None
half = copy.deepcopy(model)
apply_precision_policy(half, own_policy(device.type, capability))
nlls = [models.negative_log_likelihood(m, ids) for m in (model, half)]
weights = [sum(p.nbytes for p in m.parameters()) / 2**20 for m in (model, half)]
change = abs(nlls[1] - nlls[0])
checks.compare_prediction("Change of the NLL", predicted_change, change, "nats")
print(f"weights: {weights[0]:.0f} MiB in float32, {weights[1]:.0f} MiB under the policy")

# %% [markdown]
# In training the gradients need range, too. In this recorded run, small ones become 0 in float16 unless the loss is
# scaled:
#
# ![Recorded: a small GPT-2 trained under several policies. bfloat16, and float16 with a scaled loss, follow float32 more closely than another seed does; float16 with an unscaled loss does not.](../../theory/figures/gpt2-policies.png)
#
# [Training in low precision](low-precision-training.ipynb) has the exercise for it. The next cell has an experiment for
# each row of the table in section 2.10:

# %%
from labsupport.precision.experiments import RULES

for rule in RULES:
    if rule.component not in ("allowed error", "float32 products"):
        table = rule.experiment()
        print(f"{rule.component}: {rule.figure(table.set_index(table.columns[0]))}")
