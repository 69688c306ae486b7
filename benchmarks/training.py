"""Training steps of a decoder by length, for each memory saving; and the longest that fit.

python -m benchmarks training --preset gpt2-small --lengths 2K,8K,32K --limit 16GiB
python -m benchmarks training --preset gpt2-small --longest --limit 16GiB --save NAME
python -m benchmarks training --preset gpt2-small --longest --limit 16GiB --plain
python -m benchmarks training --preset gpt2-small --strategies 7 --lengths 1M --limit 16GiB
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks.runner import Row, Trial, lengths, run, some_of
from labsupport.profiling.timing import resolve_device
from labsupport.profiling.units import parse_bytes, parse_tokens
from labsupport.training import PRESETS, DecoderConfig, MemoryOptions
from labsupport.training.measure import measure_training, readable
from labsupport.training.memory_limit import memory_limit
from labsupport.training.planner import STRATEGIES, MemoryStrategy, longest

PLAIN = tuple(
    MemoryStrategy(f"Transformers, {name}", savings, torch.bfloat16)
    for name, savings in {
        "eager attention": MemoryOptions("eager"),
        "SDPA": MemoryOptions("sdpa"),
        "SDPA, gradient checkpointing": MemoryOptions("sdpa", checkpoint=True),
    }.items()
)
NUMBERS = [str(n) for n in range(len(STRATEGIES))]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", default="tiny", choices=sorted(PRESETS), help="the decoder's shape")
    add("--lengths", type=lengths, default="1K,2K,4K", help="tokens, by commas; 8K is 8,192")
    names = ", ".join(f"{n}: {strategy.name}" for n, strategy in enumerate(STRATEGIES))
    numbered = f"memory strategies, by number; {names}"
    # Recorded runs name the option --rungs.
    add("--strategies", "--rungs", type=some_of(NUMBERS), default=NUMBERS, help=numbered)
    add("--plain", action="store_true", help="Transformers' own GPT-2, without the lab's savings")
    add("--limit", help="such as 16GiB")
    add("--longest", action="store_true", help="search the longest sequence under --limit (GPU)")
    add("--multiple", type=parse_tokens, default="1K", help="of which --longest finds a multiple")


def measure(options: argparse.Namespace) -> pd.DataFrame:
    config = DecoderConfig.preset(options.preset)
    strategies = PLAIN if options.plain else [STRATEGIES[int(n)] for n in options.strategies]
    make_model = PlainGPT2 if options.plain else None
    if options.longest:
        if options.limit is None:
            raise SystemExit("--longest needs a --limit")
        return longest_that_trains(config, strategies, options, make_model)
    return measure_training(
        config, options.lengths, strategies=strategies, device=options.device, limit=options.limit,
        make_model=make_model,
    )  # fmt: skip


def show(table: pd.DataFrame, options: argparse.Namespace) -> str:
    return readable(table).to_string(index=False)


class PlainGPT2(nn.Module):
    """Transformers' GPT-2 as its users write it, with learned positions for `seqlen` tokens.

    Its own defaults for all but the sizes, dropout among them.
    """

    def __init__(self, config: DecoderConfig, strategy: MemoryStrategy, seqlen: int) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes: dict[str, Any] = {"n_embd": config.width, "n_layer": config.layers}
        sizes |= {"n_head": config.heads, "vocab_size": config.vocab_size, "n_positions": seqlen}
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}  # theirs may lie outside the vocabulary
        sizes |= {"attn_implementation": strategy.savings.attention, "use_cache": False}
        self.model: Any = GPT2LMHeadModel(GPT2Config(**sizes)).train()
        if strategy.savings.checkpoint:
            # The new name of gradient_checkpointing_enable.
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            (enable or self.model.gradient_checkpointing_enable)()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; Transformers shifts the labels itself."""
        return self.model(input_ids=tokens, labels=tokens).loss


def longest_that_trains(
    config: DecoderConfig,
    strategies: Sequence[MemoryStrategy],
    options: argparse.Namespace,
    make_model: Any = None,
) -> pd.DataFrame:
    """Search the longest sequence whose step really runs under a limit, for each memory saving.

    The search begins at the plan's answer; where there is no plan, it doubles the length. The row
    is that of the longest step that ran; the next longer one, of `multiple` tokens more, was out of
    memory. One that cannot run at all has the row that says why.

    Raises:
        RuntimeError: the device is a CPU, whose memory cannot be limited for some steps
            only; `planner.fits.longest` predicts there.
    """
    limit, multiple, device = options.limit, options.multiple, resolve_device(options.device)
    if device.type != "cuda":
        raise RuntimeError("the search runs into the limit again and again: it needs a GPU")

    def search(strategy: MemoryStrategy) -> Row:
        guess, widen = 1, 1
        if make_model is None:
            chosen = {"savings": strategy.savings, "autocast": strategy.autocast, "device": device}
            guess = max(1, longest(config, limit, multiple=multiple, **chosen) // multiple)
            widen = 16

        def attempt(units: int) -> Row:
            with memory_limit(limit, device):
                table = measure_training(
                    config, [units * multiple], strategies=[strategy], device=device,
                    max_seconds=0.0, progress=False, make_model=make_model,
                )  # fmt: skip
            return table.iloc[0].to_dict()

        return last_that_runs(attempt, guess, widen) or {"seqlen": 0, "status": "out of memory"}

    cases = [
        Trial({"backend": strategy.name}, partial(search, strategy)) for strategy in strategies
    ]
    about = {"limit_bytes": parse_bytes(limit), "parameters": config.parameters}
    return run(cases, device, multiple=multiple, **about)


def last_that_runs(attempt: Callable[[int], Row], guess: int, widen: int) -> Row | None:
    """Return the row of the largest number that runs: widen a bracket around the guess, halve it.

    Args:
        attempt: a number -> its row.
        guess: where to begin.
        widen: a bracket grows by 1/widen; 1 doubles.
    """
    runs, fails, best = 0, 0, None
    units = guess
    while not fails or fails - runs > 1:
        row = attempt(units)
        if row["status"] == "unsupported" and best is None:
            return row
        if row["status"] == "ok":
            runs, best = units, row
        else:
            fails = units
        if not fails:
            units = runs + max(1, runs // widen)
        elif not runs and fails > 1:
            units = fails - max(1, fails // (widen + 1))
        else:
            units = (runs + fails) // 2
        if units <= 0:
            break
    return best
