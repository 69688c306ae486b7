"""A small model that has learned to find facts again: its texts, and its weights.

The texts are those of `facts`. `python -m benchmarks.recall` trains the model, and describes how;
this module has what the notebook needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labsupport.paths import data_dir
from labsupport.profiling.timing import resolve_device
from labsupport.training.config import DecoderConfig
from labsupport.training.data import FIRST_SEED, IGNORED
from labsupport.training.decoder import Decoder
from labsupport.training.tasks.facts import MARK, Dice, FactDocument, dialogue, records
from labsupport.training.tokens import ByteTokenizer, encode

LENGTH = 2048  # bytes of the texts that the model is for


@dataclass(frozen=True)
class Stage:
    """Some steps on texts of one length, in bytes; `documents` in a step.

    facts, questions: of each text of records; its questions follow their facts anywhere.
    dialogues: how many of the texts are dialogues, with `talk_facts` and `talk_questions`.
    """

    steps: int
    length: int
    documents: int
    facts: int
    questions: int
    dialogues: int = 0
    talk_facts: int = 3
    talk_questions: int = 5


def unseen_documents(length: int = LENGTH, *, count: int = 4, seed: int = 0) -> list[FactDocument]:
    """Make texts that training did not see: `count` of records, and as many dialogues.

    Seeds count up from `seed`, and stay below `FIRST_SEED`, where those of training begin.

    Raises:
        ValueError: count below 1, or seeds from `FIRST_SEED` on.
    """
    if count < 1 or seed + count > FIRST_SEED:
        raise ValueError(f"count {count}, seed {seed}: at least 1 text, and seeds below a million")
    seeds = range(seed, seed + count)
    return [records(length, seed=s) for s in seeds] + [dialogue(length, seed=s) for s in seeds]


def recall_batches(
    stages: Sequence[Stage], *, others: float = 0.1, first_seed: int = FIRST_SEED
) -> Callable[[int], list[dict[str, Tensor]]]:
    """Return a stream for `labsupport.training.train`: step → one micro-batch of new texts.

    Args:
        stages: one after the other; the last one never ends.
        others: which share of the bytes outside of questions are labels, too.
        first_seed: of the first text; the following ones count up.

    Returns:
        stream(step): tokens and labels, int64, (documents, length). Labels are the questions with
        their answers, and a few of the other bytes; -100 elsewhere.

    Raises:
        ValueError: no stages, a share that is none, a step below 0.
    """
    if not stages or not 0 <= others <= 1:
        raise ValueError(f"{len(stages)} stages, others {others}: at least 1, and from 0 to 1")

    def stream(step: int) -> list[dict[str, Tensor]]:
        if step < 0:
            raise ValueError(f"steps count from 0, and {step} was given")
        number, seed = step, first_seed
        for stage in stages:
            if number < stage.steps or stage is stages[-1]:
                break
            number -= stage.steps
            seed += stage.steps * stage.documents
        seed += number * stage.documents
        rows = [_row(stage, i, seed + i, others) for i in range(stage.documents)]
        tokens, labels = (torch.tensor(part, dtype=torch.int64) for part in zip(*rows, strict=True))
        return [{"tokens": tokens, "labels": labels}]

    return stream


def _row(stage: Stage, place: int, seed: int, others: float) -> tuple[list[int], list[int]]:
    """Return one text's tokens and labels, `stage.length` of each."""
    talk = place < stage.dialogues
    facts, questions = stage.facts, stage.questions
    if talk:
        facts, questions = stage.talk_facts, stage.talk_questions
    write = dialogue if talk else records
    document = write(stage.length, seed=seed, facts=facts, questions=questions, ask="throughout")
    spans = [
        (question.answered[0] - len(question.prompt) + len(MARK), question.answered[1])
        for question in document.questions
        if question.answered
    ]
    encoded = encode(ByteTokenizer(), document.text, wanted=spans)
    dice = Dice(seed)
    wanted = [mark or dice.below(1000) < 1000 * others for mark in encoded.wanted or ()]
    after = [token if mark else IGNORED for token, mark in zip(encoded.tokens, wanted, strict=True)]
    return encoded.tokens, [*after[1:], IGNORED]


def load_recall(
    device: torch.device | str | None = None, *, path: Path | str | None = None
) -> Decoder:
    """Return the trained model, in eval mode, with float32 weights; by default those of the lab.

    Raises:
        OSError, SafetensorError: no such file, or a damaged one. `save_recall` writes such files.
    """
    from safetensors import safe_open

    path = data_dir() / "models" / "recall.safetensors" if path is None else Path(path)
    with safe_open(path, framework="pt") as file:
        config = DecoderConfig(**json.loads(file.metadata()["config"]))
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    with torch.random.fork_rng(devices=[]):  # the first weights are drawn, and thrown away
        model = Decoder(config)
    model.load_state_dict(tensors | {"head.weight": tensors["embedding.weight"]})
    return model.to(resolve_device(device)).eval()
