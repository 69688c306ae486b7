"""A small GPT-2, trained under several policies: which of them follow float32, which do not.

python -m labsupport.precision.experiments.gpt2       train, and print the losses and the verdict

The text is the project's LICENSE, as bytes. Each step sees 1,024 tokens and divides its loss by
`SHARE` = 1,024, like one of 1,024 processes that together make a step of a million tokens. Adam
does not react to the factor; float16 without loss scaling does: the gradients are below its
smallest numbers. Without the division the same policy trains well; that control is among the runs.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pandas as pd
import torch
from torch import nn

from labsupport.paths import project_root
from labsupport.precision.losses import compute_loss
from labsupport.precision.optimizer import MixedPrecisionOptimizer
from labsupport.precision.policy import FlashAttentionConfig, apply_precision_policy
from labsupport.precision.tracker import PrecisionTracker
from labsupport.profiling.timing import resolve_device

BATCH, SEQLEN, WIDTH, LAYERS, HEADS = 8, 128, 64, 2, 4
SHARE = 1024  # processes or micro-batches that make a step
LEARNING_RATE = 1e-3  # small enough that float32 runs of two seeds stay close: the unit of the rest
YARDSTICK, NOISE = "float32", "float32, another seed"
FAILING = "float16, loss in float16, unscaled"
CONTROL = "the same, steps of 1,024 tokens"


def train_under_policies(
    steps: int = 50, *, device: torch.device | str | None = None
) -> pd.DataFrame:
    """Train a small GPT-2 under each policy: same weights and batches, except for the second seed.

    The policies: the yardstick, its noise, two good ones, a bad one, and a control.

    Args:
        steps: of AdamW.
        device: a GPU if there is one. float16 on a CPU is slow: about six seconds for 50 steps.

    Returns:
        run, step, loss; with `.attrs["reports"]`, the `PrecisionTracker` report on the first step
        of each run.
    """
    device = resolve_device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a float16 loss is what we want to see
        coarse = FlashAttentionConfig.float16(loss=torch.float16)
    runs = {
        YARDSTICK: train(FlashAttentionConfig.float32(), steps, device),
        NOISE: train(FlashAttentionConfig.float32(), steps, device, seed=1),
        "bfloat16": train(FlashAttentionConfig.bfloat16(), steps, device),
        "float16, loss scaled": train(FlashAttentionConfig.float16(), steps, device),
        FAILING: train(coarse, steps, device, scaled=False),
        CONTROL: train(coarse, steps, device, scaled=False, share=1),
    }
    rows = [
        (name, step, loss)
        for name, (losses, _) in runs.items()
        for step, loss in enumerate(losses, 1)
    ]
    table = pd.DataFrame(rows, columns=["run", "step", "loss"])
    table.attrs["reports"] = {name: report for name, (_, report) in runs.items()}
    return table


def distances(table: pd.DataFrame) -> pd.DataFrame:
    """Return the distance of each run from float32: mean |difference of the losses| over the steps.

    Returns:
        run, distance, over noise (the distance divided by that of another seed), last loss.
    """
    losses = table.pivot(index="step", columns="run", values="loss")
    apart = losses.sub(losses[YARDSTICK], axis=0).abs().mean()
    result = apart.rename("distance").to_frame()
    result["over noise"] = result["distance"] / apart[NOISE]
    result["last loss"] = losses.iloc[-1]
    order = list(dict.fromkeys(table["run"]))
    return result.loc[order].rename_axis("run").reset_index()


def train(
    config: FlashAttentionConfig,
    steps: int,
    device: torch.device,
    *,
    seed: int = 0,
    scaled: bool = True,
    share: int = SHARE,
) -> tuple[list[float], str]:
    """Return the loss of each step, and the tracker's report on the first one.

    Args:
        config: the policy.
        seed: of the weights and the batches.
        scaled: scale the loss, if the policy needs it.
        share: divisor of the loss.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = small_gpt2().to(device)
    apply_precision_policy(model, config)
    optimizer = MixedPrecisionOptimizer(model, config, lr=LEARNING_RATE)
    if not scaled:
        optimizer.scaler = None
    text = torch.tensor(list((project_root() / "LICENSE").read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    tracker = PrecisionTracker(model)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - SEQLEN - 1, (BATCH, 1), generator=generator)
        tokens = text[starts + torch.arange(SEQLEN + 1)].to(device)
        with tracker if step == 0 else nullcontext():
            logits = model(tokens[:, :-1]).logits
            loss = compute_loss(logits, tokens[:, 1:], dtype=config.loss)
            optimizer.zero_grad()
            optimizer.backward(loss / share)
            optimizer.step()
        losses.append(loss.item())
    return losses, tracker.report()


def small_gpt2() -> nn.Module:
    """Return a GPT-2 of two layers for bytes, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=SEQLEN, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return GPT2LMHeadModel(config)


def main() -> None:
    """Train and print."""
    table = train_under_policies()
    print(distances(table).round(3).to_string(index=False))
    print(f"\nThe tracker's report on the first step in {FAILING}:")
    print(table.attrs["reports"][FAILING])


if __name__ == "__main__":
    main()
