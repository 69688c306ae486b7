"""The tasks at full size: how a model's scores rise with its window.

python -m benchmarks tasks --save NAME

Prediction, questions, code; and summaries. Scores do not depend on how busy the machine is: no time
is measured here.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from benchmarks.long_texts.calls import predict_calls, score_calls
from benchmarks.long_texts.documents import answer_by_window, plant, score_answers
from benchmarks.long_texts.summaries import chapter, summarise
from benchmarks.runner import lengths, some_of
from labsupport.models.sources.load import load_model
from labsupport.models.sources.text import python_topics, source_text, tokens_of
from labsupport.profiling.provenance import provenance
from labsupport.training.data import Document, data_origin, documents_from
from labsupport.training.tasks.windows import nll_by_window, with_repeat

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
    add("--windows", type=lengths, default="256,512,1K,2K,4K", help="tokens, separated by commas")
    add("--tasks", type=some_of(KEYS), default=list(KEYS), help="separated by commas")
    add("--documents", nargs="+", help="text files or folders, for the tasks document and summary")


def measure(options: Namespace) -> pd.DataFrame:
    loaded = load_model(options.model, attention="flash", device=options.device)
    measures = {
        "windows": measure_windows, "document": measure_document, "code": measure_code,
        "summary": measure_summaries,
    }  # fmt: skip
    tables = {}
    own = documents_from(options.documents) if options.documents else []
    for name in options.tasks:
        parts = measures[name](loaded.model, loaded.tokenizer, options.windows, own)
        tables[name] = pd.concat(list(parts), ignore_index=True)
    summaries = [text for text in tables["summary"].said if text] if "summary" in tables else []
    for name, score in (("document", score_answers), ("code", score_calls)):
        if name in tables:
            tables[name] = score(tables[name])
    scores = pd.concat([long_form(name, tables[name]) for name in tables], ignore_index=True)
    scores = scores[["task", *scores.columns.drop("task")]]
    document = data_origin(options.documents) if own else DOCUMENT
    texts = {"document": document, "code": FILE, "repeat": [AROUND, PASSAGE]}
    about = provenance(loaded.model.device, weights=loaded.source, attention="flash", texts=texts)
    scores.attrs |= {"provenance": about, "summaries": summaries}
    return scores


def show(table: pd.DataFrame, options: Namespace) -> str:
    parts = list(table.attrs["summaries"])
    for name, rows in table.groupby("task", sort=False):
        wide = rows.pivot(index=KEYS[str(name)], columns="measure", values="value")
        parts.append(wide.round(3).reset_index().to_string(index=False))
    return "\n\n".join(parts)


def measure_windows(
    model: Any, tokenizer: Any, windows: Sequence[int], _: object
) -> Iterator[pd.DataFrame]:
    """`nll_by_window` of a passage that returns, and of the ends of plain files.

    Yields:
        The rows of `nll_by_window`, with a column text: "repeat", or a module's name.
    """
    longest, passage = max(windows), source_text(PASSAGE)
    distance = longest * 3 // 4  # the larger windows reach back to the first occurrence
    passage = passage[passage.index(MARK) :]
    repeat = with_repeat(tokenizer, source_text(AROUND), passage, distance=distance)
    around = sorted({*windows, distance - 64, distance})
    yield nll_by_window(model, repeat.ids, repeat.target, around).assign(text="repeat")
    for module in PLAIN:
        ids = tokens_of(tokenizer, source_text(module), longest + 65)
        target = slice(longest + 1, longest + 65)
        yield nll_by_window(model, ids, target, windows).assign(text=module)


def measure_document(
    model: Any, tokenizer: Any, windows: Sequence[int], own: Sequence[Document]
) -> Iterator[pd.DataFrame]:
    """`answer_by_window` of a real document, as long as the largest window, with planted facts.

    Own documents are taken together, as one.
    """
    text = "\n\n".join(document.text for document in own) or python_topics()[DOCUMENT]
    for seed in (0, 1):
        document = plant(tokenizer, text, length=max(windows), seed=seed)
        yield answer_by_window(model, tokenizer, document, windows).assign(seed=seed)


def measure_code(
    model: Any, tokenizer: Any, windows: Sequence[int], _: object
) -> Iterator[pd.DataFrame]:
    """`predict_calls` of a whole file."""
    for window in windows:
        yield predict_calls(model, tokenizer, source_text(FILE), window)


def measure_summaries(
    model: Any, tokenizer: Any, _: object, own: Sequence[Document]
) -> Iterator[pd.DataFrame]:
    """`summarise` of own documents, or of some chapters, with the summaries' texts."""
    texts = {document.name: document.text for document in own}
    for name, text in (texts or {name: python_topics()[name] for name in CHAPTERS}).items():
        said, judged = summarise(model, tokenizer, chapter(text))
        rows = [
            {"summary": who, "said": said if who == "model" else "", **scores}
            for who, scores in judged.items()
        ]
        yield pd.DataFrame(rows).assign(text=name)


def long_form(task: str, table: pd.DataFrame) -> pd.DataFrame:
    """One number a row: task, its keys, measure, value."""
    keys = KEYS[task]
    numbers = table.select_dtypes("number").columns.difference(keys, sort=False)
    long = table.melt(id_vars=keys, value_vars=list(numbers), var_name="measure")
    return long.assign(task=task)
