"""A small model that has learned to find facts again: its training, and its weights.

The texts are those of `labsupport.training.documents`: records and dialogues in which facts are
planted. Asked `? locker Kov: `, the model must find `locker Kov: ` in the text above, and copy what
stands behind it. The values are random, so there is nothing else to know.

    python -m labsupport.training.tasks.recall --save data/models/recall

trains it on a CPU and writes `recall.safetensors` (float16) and `recall.json`: how, when, how well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from labsupport.paths import data_dir
from labsupport.profiling.timing import resolve_device
from labsupport.training.documents.streams import FIRST_SEED
from labsupport.training.loop import History, StepRow, TrainSettings, train
from labsupport.training.model import Decoder, DecoderConfig, Savings
from labsupport.training.tasks.recall_recipe import (
    LENGTH,
    RECIPE,
    Recipe,
    new_model,
    recall_batches,
    unseen_documents,
)

COMMAND = "python -m labsupport.training.tasks.recall --save data/models/recall"


class RecallWeightsError(RuntimeError):
    """The weights are not there, or are not what `train_recall` wrote."""


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
        on_step, progress: as for `labsupport.training.loop.train`.

    Returns:
        The model in eval mode; what each step of each round did.
    """
    model, histories = new_model(recipe), []
    first_seed = FIRST_SEED
    for number, part in enumerate(recipe.rounds, 1):
        settings = TrainSettings(
            part.steps,
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
            course={"recall": repr(recipe)},
            on_step=on_step,
            progress=progress,
        )
        histories.append(history)
        first_seed += part.documents
    return model.eval(), histories


def save_recall(model: Decoder, path: Path | str) -> Path:
    """Write the weights in float16, with the shape beside them.

    Args:
        path: of the file; `.safetensors` is added if it is not there.
    """
    from safetensors.torch import save_file

    path = Path(path).with_suffix(".safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tied:
        del tensors["head.weight"]  # the embedding again
    save_file(tensors, path, metadata={"config": json.dumps(asdict(model.config))})
    return path


def load_recall(
    device: torch.device | str | None = None,
    savings: Savings | None = None,
    *,
    path: Path | str | None = None,
) -> Decoder:
    """The trained model, in eval mode, with float32 weights.

    Args:
        device: by default the GPU if there is one.
        savings: as for `Decoder`.
        path: of the weights; by default those that come with the lab.

    Raises:
        RecallWeightsError: there is no such file, or it is not what `save_recall` wrote.
    """
    from safetensors import SafetensorError, safe_open

    where = resolve_device(device)
    path = data_dir() / "models" / "recall.safetensors" if path is None else Path(path)
    again = f"Get it back with `git checkout -- {path}`, or train it again: `{COMMAND}`"
    if not path.is_file():
        raise RecallWeightsError(f"there is no file {path}. {again}")
    try:
        with safe_open(path, framework="pt") as file:
            config = DecoderConfig(**json.loads((file.metadata() or {})["config"]))
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        with torch.random.fork_rng(devices=[]):  # the first weights are drawn, and thrown away
            model = Decoder(config, savings)
        if config.tied:
            tensors["head.weight"] = tensors["embedding.weight"]
        model.load_state_dict(tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise RecallWeightsError(f"{path} holds no recall model: {reason}. {again}") from error
    return model.to(where).eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, score, write: the command."""
    import argparse

    from labsupport.profiling.provenance import provenance
    from labsupport.training.tasks.recall_scores import accuracy_by_window, evidence_head

    parser = argparse.ArgumentParser(prog="labsupport.training.tasks.recall", description=__doc__)
    parser.add_argument("--save", required=True, help="where to: data/models/recall")
    parser.add_argument("--folder", help="for checkpoints: the same command goes on from them")
    options = parser.parse_args(arguments)

    losses: list[float] = []

    def on_step(row: StepRow) -> None:
        losses.append(row.loss)
        if (row.step + 1) % 50 == 0:
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {row.step + 1} of the round: loss {mean:.3f}", flush=True)

    model, histories = train_recall(RECIPE, folder=options.folder, on_step=on_step)
    steps = [row for history in histories for row in history]
    path = save_recall(model, options.save)
    model = load_recall("cpu", path=path)  # as it is after rounding
    windows = (128, 512, 1024, LENGTH)
    scores = accuracy_by_window(model, unseen_documents(LENGTH, count=8, seed=100), windows)
    longer = unseen_documents(2 * LENGTH, count=4, seed=400)
    scores_longer = accuracy_by_window(model, longer, (2 * LENGTH,))
    head = evidence_head(
        model, unseen_documents(LENGTH, seed=200), unseen_documents(LENGTH, seed=300)
    )
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
        "evidence_head": head,
    }
    path.with_suffix(".json").write_text(json.dumps(note, indent=1, default=str) + "\n")
    for table in (scores, scores_longer):
        print(table[table["solver"] == "model"].to_string(index=False))
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
