"""A model beyond the length of its training: four sets of rotary frequencies.

python -m benchmarks long_positions --save NAME     SmolLM2 at twice its 8,192 tokens

Nothing is trained: the weights stay as they are, only positions turn queries and keys otherwise.
"""

from argparse import ArgumentParser, Namespace

import pandas as pd

from benchmarks.runner import Trial, keep_rows, names, run
from labsupport.checks.ex_3_9_long_positions import interpolated, ntk_aware, yarn
from labsupport.models import load_model, source_text, tokens_of
from labsupport.profiling.units import parse_tokens
from labsupport.training import from_transformers
from labsupport.training.tasks.positions import nll_by_position, with_frequencies


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="as for load_model")
    add("--modules", type=names, default=["argparse"], help="texts: Python's modules")
    add("--length", type=parse_tokens, default="16K", help="tokens of each text")
    add("--bucket", type=parse_tokens, default="2K", help="tokens that are averaged over")


def measure(options: Namespace) -> pd.DataFrame:
    loaded = load_model(options.model, attention=None, device=options.device)
    trained = loaded.model.config.max_position_embeddings
    model = from_transformers(loaded.model)
    shape, factor = (model.config.head_dim, model.config.rope_base), options.length / trained
    methods = {
        "plain": (interpolated(*shape, 1.0), 1.0),
        "interpolated": (interpolated(*shape, factor), 1.0),
        "NTK-aware": (ntk_aware(*shape, factor), 1.0),
        "YaRN": yarn(*shape, factor, trained),
    }

    def case(module: str, method: str) -> Trial:
        def scores() -> list[dict]:
            ids = tokens_of(loaded.tokenizer, source_text(module), options.length + 1)
            other = with_frequencies(model, *methods[method])
            found = nll_by_position(other, ids[:, :-1], ids[:, 1:], bucket=options.bucket)
            return found.to_dict("records")

        return Trial({"text": module, "method": method}, scores)

    cases = [case(module, method) for module in options.modules for method in methods]
    about = {"weights": loaded.source, "trained": trained, "factor": factor}
    return run(cases, loaded.model.device, on_rows=keep_rows(options), **about)


def show(table: pd.DataFrame, options: Namespace) -> str:
    wide = table.pivot_table(index="window", columns="method", values="nll", sort=False)
    return wide.round(3).to_string()
