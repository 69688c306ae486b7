"""A small GPT-2, trained under several policies: which of them follow float32, which do not.

python -m labsupport.precision.experiments.gpt2       train, and print the losses and the verdict

The text is the project's LICENSE, as bytes. Each step sees 1,024 tokens and divides its loss by
`SHARE` = 1,024, like one of 1,024 processes that together make a step of a million tokens. Adam
does not react to the factor; float16 without loss scaling does: the gradients are below its
smallest numbers. Without the division the same policy trains well; that control is among the runs.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pandas as pd
import torch
from torch import nn

from labsupport.paths import project_root
from labsupport.precision.losses import compute_loss
from labsupport.precision.optimizer import MixedPrecisionOptimizer
from labsupport.precision.policy import FlashAttentionConfig, apply_precision_policy
from labsupport.precision.tracker import PrecisionTracker
from labsupport.profiling.provenance import command_line, provenance
from labsupport.profiling.timing import resolve_device

BATCH, SEQLEN, WIDTH, LAYERS, HEADS = 8, 128, 64, 2, 4
SHARE = 1024  # processes or micro-batches that make a step
YARDSTICK, NOISE = "float32", "float32, another seed"
FAILING = "float16, loss in float16, unscaled"
CONTROL = "the same, steps of 1,024 tokens"


@dataclass(frozen=True)
class Run:
    """One training run."""

    config: FlashAttentionConfig  # the policy
    seed: int = 0  # of the weights and the batches
    scaled: bool = True  # scale the loss, if the policy needs it
    share: int = SHARE  # divisor of the loss


def runs() -> dict[str, Run]:
    """Return the yardstick, its noise, two good policies, a bad one, and a control."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a float16 loss is what we want to see
        coarse = FlashAttentionConfig.float16(loss=torch.float16)
    return {
        YARDSTICK: Run(FlashAttentionConfig.float32()),
        NOISE: Run(FlashAttentionConfig.float32(), seed=1),
        "bfloat16": Run(FlashAttentionConfig.bfloat16()),
        "float16, loss scaled": Run(FlashAttentionConfig.float16()),
        FAILING: Run(coarse, scaled=False),
        CONTROL: Run(coarse, scaled=False, share=1),
    }


def train_under_policies(
    steps: int = 50,
    *,
    learning_rate: float = 1e-3,
    device: torch.device | str | None = None,
) -> pd.DataFrame:
    """Train a small GPT-2 under each policy: same weights and batches, except for the second seed.

    Args:
        steps: of AdamW.
        learning_rate: constant. Small enough that float32 runs of two seeds stay close: their
            distance is the unit of the others.
        device: a GPU if there is one. float16 on a CPU is slow: about six seconds for 50 steps.

    Returns:
        run, step, loss; with `.attrs["reports"]`, the `PrecisionTracker` report on the first step
        of each run.
    """
    device = resolve_device(device)
    frames, reports = [], {}
    for name, run in runs().items():
        losses, reports[name] = train(run, steps, learning_rate, device)
        frames.append(pd.DataFrame({"run": name, "step": range(1, steps + 1), "loss": losses}))
    table = pd.concat(frames, ignore_index=True)
    table.attrs["reports"] = reports
    table.attrs["provenance"] = provenance(device, command=command_line(), seed=0)
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
    run: Run, steps: int, learning_rate: float, device: torch.device
) -> tuple[list[float], str]:
    """Return the loss of each step, and the tracker's report on the first one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        model = small_gpt2().to(device)
    apply_precision_policy(model, run.config)
    optimizer = MixedPrecisionOptimizer(model, run.config, lr=learning_rate)
    if not run.scaled:
        optimizer.scaler = None
    text = torch.tensor(list((project_root() / "LICENSE").read_bytes()))
    generator = torch.Generator().manual_seed(run.seed)
    tracker = PrecisionTracker(model)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(text) - SEQLEN - 1, (BATCH, 1), generator=generator)
        tokens = text[starts + torch.arange(SEQLEN + 1)].to(device)
        with tracker if step == 0 else nullcontext():
            logits = model(tokens[:, :-1]).logits
            loss = compute_loss(logits, tokens[:, 1:], dtype=run.config.loss)
            optimizer.zero_grad()
            optimizer.backward(loss / run.share)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.precision.experiments.gpt2",
        description="Train a small GPT-2 under several precision policies.",
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", help="cpu or cuda; default: the GPU if there is one")
    options = parser.parse_args(arguments)
    table = train_under_policies(options.steps, device=options.device)
    print(distances(table).round(3).to_string(index=False))
    print(f"\nThe tracker's report on the first step in {FAILING}:")
    print(table.attrs["reports"][FAILING])


if __name__ == "__main__":
    main()
