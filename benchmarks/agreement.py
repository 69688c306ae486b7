"""Distance between training with textbook attention and with another one.

python -m benchmarks agreement --save NAME       200 steps of 2,048 tokens, three runs
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch

from labsupport.attention.accuracy import ErrorReport, compare_with_oracle
from labsupport.profiling.provenance import provenance
from labsupport.profiling.timing import resolve_device
from labsupport.training import Decoder, DecoderConfig, MemoryOptions, TrainConfig, tensors, train
from labsupport.training.consistency import together
from labsupport.training.data import data_origin, named_batches, named_tokenizer

Batches = Callable[[int], Iterable[Any]]


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", default="source", help="as for `labsupport train`")
    add("--length", type=int, default=2048, help="tokens of a sequence")
    add("--steps", type=int, default=200)


def measure(options: Namespace) -> pd.DataFrame:
    device = resolve_device(options.device)
    # On a GPU, FlashAttention's kernels take no float32.
    other = "sdpa_flash" if device.type == "cpu" else "sdpa_efficient"
    tokenizer = named_tokenizer("bytes")
    config = DecoderConfig.preset("tiny", vocab_size=tokenizer.vocab_size)

    def batches(seed: int) -> Batches:
        return named_batches(options.data, tokenizer, options.length, seed=seed)

    errors = gradient_errors(config, batches(0), other, device)
    worst = max(errors, key=lambda name: errors[name].max_error / errors[name].allowed)
    rates = {"learning_rate": 1e-3, "warmup_steps": min(20, options.steps // 2)}
    tables = []
    for attention, seed in (("standard", 0), (other, 0), ("standard", 1)):
        torch.manual_seed(seed)
        model = Decoder(config, MemoryOptions(attention)).to(device)
        settings = TrainConfig(options.steps, **rates, seed=seed)
        run = train(model, batches(seed), settings).frame()[["step", "loss", "grad_norm"]]
        tables.append(run.assign(backend=attention, seed=seed))
    table = pd.concat(tables, ignore_index=True)
    table.attrs["provenance"] = provenance(
        device,
        parameters=config.parameters,
        **rates,
        data=data_origin(options.data),
        length=options.length,
        worst_gradient=worst,
        worst_gradient_error=errors[worst].max_error,
        worst_gradient_allowed=errors[worst].allowed,
    )
    return table


def gradient_errors(
    config: DecoderConfig, batches: Batches, attention: str, device: torch.device
) -> dict[str, ErrorReport]:
    """Judge the first step's gradients of each parameter by flash-attn's rule.

    The oracle is the whole model in float64; the yardstick is the same float32 model with textbook
    attention. All three have the same weights, from seed 0, and see the tokens of step 0.

    Returns:
        an `ErrorReport` for each parameter, by name. Errors and what is allowed are relative to the
        parameter's largest exact gradient: gradients of a mean loss are small numbers, which the
        rule's floor of 1e-5 would let pass in any case.
    """

    def gradients(attention: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model: Any = Decoder(config, MemoryOptions(attention=attention)).to(device, dtype)
        for batch in batches(0):
            inputs = {name: value.to(device) for name, value in tensors(batch).items()}
            model(**inputs).backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    exact = gradients("standard", torch.float64)
    textbook = gradients("standard", torch.float32)
    judged = gradients(attention, torch.float32)
    scale = {name: gradient.abs().max().clamp(min=1e-300) for name, gradient in exact.items()}
    return {
        name: compare_with_oracle(
            *(each[name] / scale[name] for each in (judged, textbook, exact)), gradient=True
        )
        for name in exact
    }


def show(table: pd.DataFrame, options: Namespace) -> str:
    about = table.attrs["provenance"]
    last = table[table.step == table.step.max()][["backend", "seed", "loss"]].round(4)
    return (
        f"first step, the worst gradient, {about['worst_gradient']}: error "
        f"{about['worst_gradient_error']:.1e}, {about['worst_gradient_allowed']:.1e} allowed\n"
        f"first 20 losses: at most {together(table):.1e} apart\n{last.to_string(index=False)}"
    )
