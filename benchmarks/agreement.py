"""Training with textbook attention and with another one: how far are they apart?

python -m benchmarks agreement --save NAME       200 steps of 2,048 tokens, three runs
"""

from argparse import ArgumentParser, Namespace
from dataclasses import replace

import pandas as pd

from labsupport.profiling.timing import resolve_device
from labsupport.training import DecoderConfig
from labsupport.training.consistency import (
    SETTINGS,
    Batches,
    Course,
    gradient_errors,
    together,
    training_courses,
)
from labsupport.training.data import data_origin, named_batches, named_tokenizer


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", default="source", help="as for `labsupport train`")
    add("--length", type=int, default=2048, help="tokens of a sequence")
    add("--steps", type=int, default=SETTINGS.steps)


def measure(options: Namespace) -> pd.DataFrame:
    device = resolve_device(options.device)
    # On a GPU, FlashAttention's kernels take no float32.
    other = "sdpa_flash" if device.type == "cpu" else "sdpa_efficient"
    tokenizer = named_tokenizer("bytes")
    config = DecoderConfig.preset("tiny", vocab_size=tokenizer.vocab_size)

    def batches(seed: int) -> Batches:
        return named_batches(options.data, tokenizer, options.length, seed=seed)

    errors = gradient_errors(config, batches(0), other, device=device)
    worst = max(errors, key=lambda name: errors[name].max_error / errors[name].allowed)
    courses = [Course("standard", 0), Course(other, 0), Course("standard", 1)]
    warmup = min(SETTINGS.warmup_steps, options.steps // 2)
    settings = replace(SETTINGS, steps=options.steps, warmup_steps=warmup)
    table = training_courses(config, batches, courses, settings, device=device)
    table.attrs["provenance"] |= {
        "data": data_origin(options.data),
        "length": options.length,
        "worst_gradient": worst,
        "worst_gradient_error": errors[worst].max_error,
        "worst_gradient_allowed": errors[worst].allowed,
    }
    return table


def show(table: pd.DataFrame, options: Namespace) -> str:
    about = table.attrs["provenance"]
    last = table[table.step == table.step.max()][["backend", "seed", "loss"]].round(4)
    return (
        f"first step, the worst gradient, {about['worst_gradient']}: error "
        f"{about['worst_gradient_error']:.1e}, {about['worst_gradient_allowed']:.1e} allowed\n"
        f"first 20 losses: at most {together(table):.1e} apart\n{last.to_string(index=False)}"
    )
