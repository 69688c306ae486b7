"""Opening a model or a tokenizer that lies on this disk or on the hub, and whole ones only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from labsupport.models.sources.build import note_of, quiet
from labsupport.models.sources.catalog import CATALOG, Model
from labsupport.models.sources.hub import first_line

if TYPE_CHECKING:
    import torch


def open_model(where: str, dtype: torch.dtype, **options: Any) -> Any:
    """What Transformers makes of a folder or a hub id.

    Raises:
        ValueError: tensors that are missing, or of another shape.
        Exception: whatever Transformers raises.
    """
    from transformers import AutoModelForCausalLM

    with quiet():
        model, report = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, output_loading_info=True, **options
        )
    lost = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if lost:  # Transformers would go on with random numbers there
        raise ValueError(f"no weights, or of another shape, for {len(lost)} tensors ({lost[0]}, …)")
    return model


def open_tokenizer(where: str, **options: Any) -> Any:
    """What Transformers makes of a folder or a hub id, padding on the left.

    Raises:
        ValueError: it has no vocabulary.
        Exception: whatever Transformers raises.
    """
    from transformers import AutoTokenizer

    with quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(where, **options)
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Where its files are missing, Transformers makes some families' tokenizer out of nothing.
        raise ValueError("the tokenizer has no vocabulary: its files are missing")
    # A batch of prompts must end where its answers begin.
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_of(path: Path) -> Any:
    """The tokenizer in a folder, or beside a file; None if there is none.

    Raises:
        ValueError: it cannot be read.
    """
    from labsupport.models.llama2c.tokenizer import read_tokenizer

    folder = path if path.is_dir() else path.parent
    llama2c = [folder / name for name in ("tokenizer.bin", "tokenizer.model")]
    try:
        if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            return open_tokenizer(str(folder))
        return next((read_tokenizer(file) for file in llama2c if file.is_file()), None)
    except Exception as error:
        known = made_here(folder)
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {first_line(error)}."
            + (f" Delete the folder, then `labsupport fetch {known.name}`." if known else "")
        ) from error


def made_here(folder: Path) -> Model | None:
    """The known model that `fetch` made a folder for, if it did; its files may be damaged."""
    sha256 = note_of(folder).get("sha256")
    return next((model for model in CATALOG.values() if model.package.sha256 == sha256), None)
