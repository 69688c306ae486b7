"""A whole model under different attention implementations: it reads one of Python's own files.

python -m benchmarks models --lengths 2048,4096,8192 --save NAME
"""

from argparse import ArgumentParser, Namespace

import pandas as pd

from benchmarks.runner import lengths, names
from labsupport.models import load_model, measure_model, source_text, tokens_of
from labsupport.profiling import measured_ceilings, readable, speedup


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="as for load_model")
    add("--module", default="argparse", help="a module of Python's standard library: the text")
    add("--attentions", type=names, default=["eager", "flash"], help="separated by commas")
    add("--lengths", type=lengths, default="1K,2K", help="tokens, separated by commas")


def measure(options: Namespace) -> pd.DataFrame:
    loaded = load_model(options.model, attention=None, device=options.device)
    ids = tokens_of(loaded.tokenizer, source_text(options.module), max(options.lengths))
    device = loaded.model.device
    table = measure_model(
        loaded.model, ids.to(device), attentions=options.attentions, lengths=options.lengths
    )
    table.attrs["provenance"] |= {
        "weights": loaded.source,
        "text": f"source of {options.module}",
        "matmul_tflops": measured_ceilings(device).matmul_tflops,
    }
    return table


def show(table: pd.DataFrame, options: Namespace) -> str:
    shown = readable(speedup(table, over=options.attentions[0]))
    return shown.assign(NLL=table.loss.round(5)).to_string(index=False)
