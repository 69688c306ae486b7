"""A small model that has learned to find facts again: its training, and its weights.

The texts are those of `labsupport.training.facts`: records and dialogues in which facts are
planted. Asked `? locker Kov: `, the model must find `locker Kov: ` in the text above, and copy what
follows it. The values are random, so there is nothing else to know.

To find a key is what an induction circuit does: one layer gathers the bytes before each position,
and a later one looks for the position with the same bytes before it (Olsson et al., "In-context
Learning and Induction Heads", 2022). The first half is useless without the second, so small models
find it late. Three things make it come within seconds:

* Texts of 192 bytes with three facts and eight questions come first, longer ones later.
* Matrices are drawn with 1/√width, and not with GPT-2's 0.02 (`gain`).
* Heads of the first layers begin by looking a few bytes back (`look_back`). What to do with that
  (which bytes are a key, what to compare, what to copy) is left to learn. In a trial of width 64,
  98% of the answers' digits were right after 500 steps; without this, 40%.

    python -m labsupport.training.tasks.recall --save data/models/recall

trains it on a CPU and writes `recall.safetensors` (float16) and `recall.json`: how, when, how well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from labsupport.paths import data_dir
from labsupport.profiling.timing import resolve_device
from labsupport.training.config import DecoderConfig, MemoryOptions, TrainConfig
from labsupport.training.data import FIRST_SEED, IGNORED
from labsupport.training.decoder import Block, Decoder
from labsupport.training.facts import MARK, Dice, FactDocument, dialogue, records
from labsupport.training.history import History, StepRow
from labsupport.training.tokens import ByteTokenizer, encode
from labsupport.training.train import train

LENGTH = 2048  # bytes of the texts that the model is for
COMMAND = "python -m labsupport.training.tasks.recall --save data/models/recall"


class RecallWeightsError(RuntimeError):
    """The weights are missing, or are not what `save_recall` wrote."""


@dataclass(frozen=True)
class Stage:
    """Some steps on texts of one length.

    steps: number of them.
    length: of each text, in bytes.
    documents: texts in a step.
    facts, questions: of each text of records; its questions follow their facts anywhere.
    dialogues: how many of the texts are dialogues.
    talk_facts, talk_questions: of each dialogue.
    """

    steps: int
    length: int
    documents: int
    facts: int
    questions: int
    dialogues: int = 0
    talk_facts: int = 3
    talk_questions: int = 5


@dataclass(frozen=True)
class Round:
    """A run of `labsupport.training.train`, from the weights of the round before.

    stages: one after the other.
    learning_rate, warmup_steps, decay_steps: as in `TrainConfig`.
    """

    stages: tuple[Stage, ...]
    learning_rate: float
    warmup_steps: int = 50
    decay_steps: int | None = None


@dataclass(frozen=True)
class Recipe:
    """All that the weights depend on, apart from versions and the number of threads.

    config: the decoder's shape.
    rounds: short texts first: there are fewer places to look at.
    look_back: for each of the first layers, how many bytes back its heads begin to look.
    gain: how much larger the matrices are drawn than GPT-2's. 1/√96 is 5.1 times its 0.02, which is
        for wide models: here all scores would begin near zero, and stay there long.
    others: which share of the bytes outside of questions are labels, too.
    seed: of weights and texts.
    """

    config: DecoderConfig
    rounds: tuple[Round, ...]
    look_back: tuple[tuple[int, ...], ...] = ()
    gain: float = 1.0
    others: float = 0.05
    seed: int = 0


RECIPE = Recipe(
    DecoderConfig(
        vocab_size=ByteTokenizer.vocab_size,
        width=96,
        layers=3,
        heads=6,
        mlp_width=192,
        norm="rms",
        rope_base=100_000.0,
    ),
    rounds=(
        Round(
            (
                Stage(400, 192, 16, facts=3, questions=8),
                Stage(600, 1024, 4, 10, 40, dialogues=3, talk_facts=3, talk_questions=12),
                Stage(800, 1024, 6, 10, 40, dialogues=5, talk_facts=6, talk_questions=8),
                Stage(200, 2048, 3, 20, 80, dialogues=2, talk_facts=12, talk_questions=20),
            ),
            learning_rate=3e-3,
            decay_steps=2310,
        ),
        # With more facts to be told apart, and once more at a higher rate.
        Round(
            (
                Stage(460, 2048, 3, 30, 80, dialogues=2, talk_facts=16, talk_questions=15),
                Stage(40, 4096, 2, 60, 160, dialogues=1, talk_facts=38, talk_questions=28),
            ),
            learning_rate=1.2e-3,
            warmup_steps=20,
        ),
        Round(
            (Stage(280, 2048, 3, 30, 80, dialogues=2, talk_facts=16, talk_questions=15),),
            learning_rate=8e-4,
            warmup_steps=10,
        ),
    ),
    look_back=((1, 2, 3, 4, 5, 6), (3, 6, 9, 12)),
    gain=5.1,
)


def new_model(recipe: Recipe = RECIPE) -> Decoder:
    """Return the decoder before its first step."""
    torch.manual_seed(recipe.seed)
    model = Decoder(recipe.config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter *= recipe.gain
        for layer, offsets in enumerate(recipe.look_back):
            look_back(model, layer, offsets)
    return model


def look_back(
    model: Decoder, layer: int, offsets: Sequence[int], *, sharpness: float = 4.0
) -> None:
    """Let a layer's first heads begin by looking `offsets` bytes back, whatever the bytes are.

    A rotary score depends on positions by their distance. Of a constant query and key it is
    Σ cos(θ_f · (distance - offset)) over the frequencies θ_f, if the query is turned back by
    `offset`: highest at that distance. Constants are biases.

    Args:
        model: with rotary positions in halves, biases, and no grouped heads; changed in place.
        layer: which one.
        offsets: bytes, one for each head; heads without one stay as they are drawn.
        sharpness: how much lower the score is one byte further: 4 gives e^4 times less weight.
    """
    part, config = cast(Block, model.blocks[layer]).attention, model.config
    half = config.head_dim // 2
    angles = config.rope_base ** (-torch.arange(half) / half)
    size = math.sqrt(sharpness * math.sqrt(config.head_dim) / float((1 - angles.cos()).sum()))
    for head, offset in enumerate(offsets):
        rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
        part.query.weight[rows] *= 0.1
        part.key.weight[rows] *= 0.1
        part.key.bias[rows] = size * torch.cat([torch.ones(half), torch.zeros(half)])
        turned = [(angles * offset).cos(), -(angles * offset).sin()]
        part.query.bias[rows] = size * torch.cat(turned)


def unseen_documents(length: int = LENGTH, *, count: int = 4, seed: int = 0) -> list[FactDocument]:
    """Make texts that training did not see: `count` of records, and as many dialogues.

    Seeds count up from `seed`, and stay below `FIRST_SEED`, where those of training begin.
    """
    seeds = range(seed, seed + count)
    return [records(length, seed=s) for s in seeds] + [dialogue(length, seed=s) for s in seeds]


def recall_batches(
    stages: Sequence[Stage], *, others: float = 0.1, first_seed: int = FIRST_SEED
) -> Callable[[int], list[dict[str, Tensor]]]:
    """Return a stream for `labsupport.training.train`: step → one micro-batch of new texts.

    Args:
        stages: one after the other; the last one goes on for ever.
        others: as in `Recipe`.
        first_seed: of the first text; the following ones count up.

    Returns:
        stream(step): tokens and labels, int64, (documents, length). Labels are the questions with
        their answers, and a few of the other bytes; -100 elsewhere.
    """

    def stream(step: int) -> list[dict[str, Tensor]]:
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


def train_recall(
    recipe: Recipe = RECIPE,
    *,
    folder: Path | str | None = None,
    on_step: Callable[[StepRow], None] | None = None,
    progress: bool = False,
) -> tuple[Decoder, list[History]]:
    """Train a new model by the recipe, on the CPU.

    Args:
        recipe: what to do, in rounds.
        folder: for checkpoints; the same call goes on from the newest.
        on_step, progress: as for `labsupport.training.train`.

    Returns:
        The model in eval mode; what each step of each round did.
    """
    model, histories, first_seed = new_model(recipe), [], FIRST_SEED
    for number, part in enumerate(recipe.rounds, 1):
        settings = TrainConfig(
            sum(stage.steps for stage in part.stages),
            part.learning_rate,
            warmup_steps=part.warmup_steps,
            decay_steps=part.decay_steps,
            weight_decay=0.01,
            checkpoint_every=100,
            seed=recipe.seed,
        )
        history = train(
            model,
            recall_batches(part.stages, others=recipe.others, first_seed=first_seed),
            settings,
            folder=None if folder is None else Path(folder) / f"round-{number}",
            run_config={"recall": repr(recipe)},
            on_step=on_step,
            progress=progress,
        )
        histories.append(history)
        first_seed += sum(stage.steps * stage.documents for stage in part.stages)
    return model.eval(), histories


def save_recall(model: Decoder, path: Path | str) -> Path:
    """Write the weights in float16, with the shape beside them, to `path` + ".safetensors"."""
    from safetensors.torch import save_file

    path = Path(path).with_suffix(".safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    tensors.pop("head.weight")  # the embedding again
    save_file(tensors, path, metadata={"config": json.dumps(asdict(model.config))})
    return path


def load_recall(
    device: torch.device | str | None = None,
    savings: MemoryOptions | None = None,
    *,
    path: Path | str | None = None,
) -> Decoder:
    """Return the trained model, in eval mode, with float32 weights.

    Args:
        device: by default the GPU if there is one.
        savings: as for `Decoder`.
        path: of the weights; by default those that come with the lab.

    Raises:
        RecallWeightsError: there is no such file, or it is not what `save_recall` wrote.
    """
    from safetensors import SafetensorError, safe_open

    path = data_dir() / "models" / "recall.safetensors" if path is None else Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            config = DecoderConfig(**json.loads((file.metadata() or {})["config"]))
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise RecallWeightsError(
            f"{path} holds no recall model: {error}. Get it back with `git checkout -- {path}`, or "
            f"train it again: `{COMMAND}`"
        ) from error
    with torch.random.fork_rng(devices=[]):  # the first weights are drawn, and thrown away
        model = Decoder(config, savings)
    model.load_state_dict(tensors | {"head.weight": tensors["embedding.weight"]})
    return model.to(resolve_device(device)).eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, score, write: the command."""
    import argparse

    from labsupport.profiling.provenance import provenance
    from labsupport.training.tasks.recall_scores import accuracy_by_window, evidence_head

    parser = argparse.ArgumentParser(prog="labsupport.training.tasks.recall", description=__doc__)
    parser.add_argument("--save", required=True, help="where to: data/models/recall")
    parser.add_argument("--folder", help="for checkpoints: the same command goes on from them")
    options = parser.parse_args(arguments)

    model, histories = train_recall(RECIPE, folder=options.folder, progress=True)
    steps = [row for history in histories for row in history]
    path = save_recall(model, options.save)
    model = load_recall("cpu", path=path)  # as it is after rounding
    windows = (128, 512, 1024, LENGTH)
    scores = accuracy_by_window(model, unseen_documents(LENGTH, count=8, seed=100), windows)
    longer = unseen_documents(2 * LENGTH, count=4, seed=400)
    scores_longer = accuracy_by_window(model, longer, (2 * LENGTH,))
    first, others = (unseen_documents(LENGTH, seed=seed) for seed in (200, 300))
    note = {
        "what": "weights of labsupport.training.tasks.recall, and how they came about",
        **provenance("cpu"),
        "parameters": model.config.parameters,
        "bytes": path.stat().st_size,
        "steps": len(steps),
        "minutes": round(sum(row.seconds for row in steps) / 60, 1),
        "last_loss": round(sum(row.loss for row in steps[-50:]) / 50, 4),
        "recipe": asdict(RECIPE),
        "scores": scores.round(4).to_dict("records"),
        "scores_longer": scores_longer.round(4).to_dict("records"),
        "evidence_head": evidence_head(model, first, others),
    }
    path.with_suffix(".json").write_text(json.dumps(note, indent=1, default=str) + "\n")
    for table in (scores, scores_longer):
        print(table[table["solver"] == "model"].to_string(index=False))
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
