"""The tasks at full size: how a model's scores rise with its window.

python -m benchmarks tasks --save NAME

Prediction, questions, code; and summaries. Scores do not depend on how busy the machine is: no time
is measured here.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.calls import predict_calls, score_calls
from benchmarks.documents import answer_by_window, plant, score_answers
from benchmarks.runner import lengths, some_of
from benchmarks.summaries import chapter, summarise
from labsupport.models.sources.load import load_model
from labsupport.models.sources.text import python_topics, source_text, tokens_of
from labsupport.profiling.provenance import provenance
from labsupport.training.tasks.windows import nll_by_window, with_repeat

if TYPE_CHECKING:
    import pandas as pd

# Texts: modules of the standard library, and topics of Python's help.
AROUND, PASSAGE, MARK = "argparse", "heapq", "def merge("
PLAIN = ("argparse", "statistics", "configparser")
DOCUMENT, FILE = "specialnames", "configparser"
CHAPTERS = ("async", "try", "naming")
KEYS = {
    "windows": ["text", "window"],
    "document": ["window"],
    "code": ["window", "sites"],
    "summary": ["text", "summary"],
}


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="as for load_model; one with a chat template")
    add("--attention", default="flash", help="as for set_attention")
    add("--windows", type=lengths, default="256,512,1K,2K,4K", help="tokens, separated by commas")
    add("--tasks", type=some_of(KEYS), default=list(KEYS), help="separated by commas")


def measure(options: Namespace) -> pd.DataFrame:
    import pandas as pd

    loaded = load_model(options.model, attention=options.attention, device=options.device)
    model, tokenizer, windows = loaded.model, loaded.tokenizer, options.windows
    tasks = {
        "windows": lambda: measure_windows(model, tokenizer, windows),
        "document": lambda: score_answers(measure_document(model, tokenizer, windows)),
        "code": lambda: score_calls(measure_code(model, tokenizer, windows)),
        "summary": lambda: measure_summaries(model, tokenizer),
    }
    tables = {name: tasks[name]() for name in options.tasks}
    scores = pd.concat([long_form(name, tables[name]) for name in tables], ignore_index=True)
    scores = scores[["task", *scores.columns.drop("task")]]
    if "summary" in tables:
        scores.attrs["summaries"] = [text for text in tables["summary"].said if text]
    scores.attrs["provenance"] = provenance(
        model.device,
        weights=loaded.source,
        attention=options.attention,
        texts={"document": DOCUMENT, "code": FILE, "repeat": [AROUND, PASSAGE]},
    )
    return scores


def show(table: pd.DataFrame, options: Namespace) -> str:
    parts = list(table.attrs.get("summaries", ()))
    for name, rows in table.groupby("task", sort=False):
        wide = rows.pivot(index=KEYS[str(name)], columns="measure", values="value")
        parts.append(wide.round(3).reset_index().to_string(index=False))
    return "\n\n".join(parts)


def measure_windows(model: Any, tokenizer: Any, windows: Sequence[int]) -> pd.DataFrame:
    """`nll_by_window` of a passage that returns, and of the ends of plain files.

    Returns:
        The rows of `nll_by_window`, with a column text: "repeat", or a module's name.
    """
    import pandas as pd

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

    source = source_text(FILE)
    tables = [predict_calls(model, tokenizer, source, window) for window in windows]
    return pd.concat(tables, ignore_index=True)


def measure_summaries(model: Any, tokenizer: Any) -> pd.DataFrame:
    """`summarise` of some chapters, with the summaries' texts."""
    import pandas as pd

    rows = []
    for name in CHAPTERS:
        said, judged = summarise(model, tokenizer, chapter(python_topics()[name]))
        for who, scores in judged.items():
            row = {"text": name, "summary": who, "said": said if who == "model" else ""}
            rows.append(row | scores)
    return pd.DataFrame(rows)


def long_form(task: str, table: pd.DataFrame) -> pd.DataFrame:
    """One number a row: task, its keys, measure, value."""
    keys = KEYS[task]
    numbers = table.select_dtypes("number").columns.difference(keys, sort=False)
    long = table.melt(id_vars=keys, value_vars=list(numbers), var_name="measure")
    return long.assign(task=task)
