"""All of the tasks at full size: how a model's scores rise with its window.

Scores do not depend on how busy the machine is: no time is measured here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from labsupport.training.tasks.code import predict_calls, score_calls
from labsupport.training.tasks.document import answer_by_window, score_answers
from labsupport.training.tasks.planted import plant
from labsupport.training.tasks.summary import chapter, summarise
from labsupport.training.tasks.windows import nll_by_window, with_repeat

if TYPE_CHECKING:
    import pandas as pd

# Texts: modules of the standard library, and topics of Python's help.
AROUND, PASSAGE, MARK = "argparse", "heapq", "def merge("
PLAIN = ("argparse", "statistics", "configparser")
DOCUMENT, FILE = "specialnames", "configparser"
CHAPTERS = ("async", "try", "naming")


def measure_windows(model: Any, tokenizer: Any, windows: Sequence[int]) -> pd.DataFrame:
    """`nll_by_window` of a passage that returns, and of the ends of plain files.

    Returns:
        The rows of `nll_by_window`, with a column text: "repeat", or a module's name.
    """
    import pandas as pd

    from labsupport.models.sources.text import source_text, tokens_of

    passage = source_text(PASSAGE)
    distance = max(windows) * 3 // 4  # the larger windows reach back to the first occurrence
    repeat = with_repeat(
        tokenizer, source_text(AROUND), passage[passage.index(MARK) :], distance=distance
    )
    tables = [
        nll_by_window(
            model, repeat.ids, repeat.target, sorted({*windows, distance - 64, distance})
        ).assign(text="repeat")
    ]
    for module in PLAIN:
        ids = tokens_of(tokenizer, source_text(module), max(windows) + 65)
        plain = nll_by_window(model, ids, slice(max(windows) + 1, max(windows) + 65), windows)
        tables.append(plain.assign(text=module))
    return pd.concat(tables, ignore_index=True)


def measure_document(
    model: Any, tokenizer: Any, windows: Sequence[int], *, seeds: Sequence[int] = (0, 1)
) -> pd.DataFrame:
    """`answer_by_window` of a real document, as long as the largest window, with planted facts."""
    import pandas as pd

    from labsupport.models.sources.text import python_topics

    text = python_topics()[DOCUMENT]
    tables = []
    for seed in seeds:
        document = plant(tokenizer, text, length=max(windows), seed=seed)
        table = answer_by_window(model, tokenizer, document, windows)
        tables.append(table.assign(seed=seed))
    return pd.concat(tables, ignore_index=True)


def measure_code(model: Any, tokenizer: Any, windows: Sequence[int]) -> pd.DataFrame:
    """`predict_calls` of a whole file."""
    import pandas as pd

    from labsupport.models.sources.text import source_text

    source = source_text(FILE)
    tables = [predict_calls(model, tokenizer, source, window) for window in windows]
    return pd.concat(tables, ignore_index=True)


def measure_summaries(model: Any, tokenizer: Any) -> pd.DataFrame:
    """`summarise` of some chapters, with the summaries' texts."""
    import pandas as pd

    from labsupport.models.sources.text import python_topics

    tables = []
    for name in CHAPTERS:
        text, table = summarise(model, tokenizer, chapter(python_topics()[name]))
        table["said"] = [text, ""]
        tables.append(table.assign(text=name))
    return pd.concat(tables, ignore_index=True)


def long_form(task: str, table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """One number a row: task, the keys, measure, value."""
    numbers = table.select_dtypes("number").columns.difference([*keys], sort=False)
    long = table.melt(id_vars=list(keys), value_vars=list(numbers), var_name="measure")
    return long.assign(task=task)


def main(arguments: Sequence[str] | None = None) -> None:
    """How a model's scores rise with its window: prediction, questions, code; and summaries."""
    import pandas as pd

    from labsupport.models.sources.load import load_model
    from labsupport.profiling.provenance import provenance
    from labsupport.profiling.runs import add_save_options, save_if_asked

    parser = argparse.ArgumentParser(
        prog="python -m labsupport.training.tasks", description=main.__doc__
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="as for load_model; one with a chat template")
    add("--attention", default="flash", help="as for set_attention")
    add("--windows", default="256,512,1024,2048,4096", help="tokens, separated by commas")
    add("--tasks", default="windows,document,code,summary", help="separated by commas")
    add_save_options(parser)
    options = parser.parse_args(arguments)
    windows = [int(window) for window in options.windows.split(",")]
    tasks: dict[str, Callable[[], pd.DataFrame]] = {
        "windows": lambda: measure_windows(model, tokenizer, windows),
        "document": lambda: score_answers(measure_document(model, tokenizer, windows)),
        "code": lambda: score_calls(measure_code(model, tokenizer, windows)),
        "summary": lambda: measure_summaries(model, tokenizer),
    }
    keys = {"windows": ["text", "window"], "document": ["window"], "code": ["window", "sites"]}
    chosen = options.tasks.split(",")
    if unknown := set(chosen) - set(tasks):
        parser.error(f"no task is called {', '.join(unknown)}; there are {', '.join(tasks)}")
    loaded = load_model(options.model, attention=options.attention)
    model, tokenizer = loaded.model, loaded.tokenizer
    parts = []
    for name in chosen:
        table = tasks[name]()
        for said in table.get("said", ()):
            print(said, end="\n\n" if said else "")
        print(table.drop(columns="said", errors="ignore").round(3).to_string(index=False) + "\n")
        parts.append(long_form(name, table, keys.get(name, ["text", "summary"])))
    if options.save:
        scores = pd.concat(parts, ignore_index=True)
        scores = scores[["task", *[name for name in scores if name != "task"]]]
        scores.attrs["provenance"] = provenance(
            model.device,
            weights=loaded.source,
            attention=options.attention,
            texts={"document": DOCUMENT, "code": FILE, "repeat": [AROUND, PASSAGE]},
        )
        save_if_asked(scores, options)
