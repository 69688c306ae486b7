"""The command `labsupport generate`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from labsupport.models.generation.compare import Comparison
    from labsupport.models.generation.result import Generation

Option = typer.Option


def generate_command(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, Option(help="Read the prompt from a file.")] = None,
    model: Annotated[
        str,
        Option(help="A known name (smollm2, stories15m, gpt2), a folder, a .bin file, a hub id."),
    ] = "smollm2",
    attention: Annotated[
        str | None,
        Option(
            help="standard, flash (any IO-aware backend), auto, or a backend's name. "
            "Default: the environment variable LABSUPPORT_ATTENTION, else auto."
        ),
    ] = None,
    max_new_tokens: Annotated[int, Option(help="At most so many; 0 runs the prefill alone.")] = 64,
    cache: Annotated[str, Option(help="dynamic, static, or graphed (the lab's fast loop).")] = (
        "dynamic"
    ),
    batch: Annotated[int, Option(min=1, help="Run the prompt so many times side by side.")] = 1,
    temperature: Annotated[float, Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, Option(help="Sample among so many likeliest tokens.")] = None,
    seed: Annotated[int, Option(help="Of the sampling.")] = 0,
    dtype: Annotated[
        str | None, Option(help="float32, bfloat16, float16. Default: what suits the device.")
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda. Default: the GPU, if any.")] = None,
    chat: Annotated[
        bool | None,
        Option(
            "--chat/--no-chat",
            help="Wrap the prompt as a message. Default: if the model has a chat template.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        Option("--compare", help="Also run standard attention, and say how far the two agree."),
    ] = False,
    warm_up: Annotated[
        bool, Option("--warm-up", help="Run once before the run that is timed.")
    ] = False,
    verbose: Annotated[
        int,
        Option("--verbose", "-v", count=True, help="Attention by layer; -vv: time by step."),
    ] = 0,
    json_file: Annotated[
        Path | None, Option("--json", help="Also write the result to this file.")
    ] = None,
    download: Annotated[
        bool, Option("--download", help="Fetch the model if it is not here.")
    ] = False,
) -> None:
    """Continue a text, and say how fast, with how much memory, and by which attention.

    \b
    labsupport generate "What is attention?" -v
    labsupport generate --prompt-file long.txt --attention flash --compare
    """
    text = _prompt(prompt, prompt_file)
    if compare and (temperature or batch > 1 or cache != "dynamic"):
        raise ValueError(
            "--compare takes one greedy text with the dynamic cache: "
            "leave --temperature, --batch and --cache away"
        )
    _check_json(json_file)
    if verbose:
        _log_to_stderr()

    from labsupport.models import generate, load_model
    from labsupport.models.integration.select import chosen_attention
    from labsupport.profiling.provenance import provenance

    chosen = chosen_attention(attention)
    loaded = load_model(
        model, attention=chosen, dtype=_dtype(dtype), device=device, download=download
    )
    if chat is None:
        chat = bool(getattr(loaded.tokenizer, "chat_template", None))
    typer.echo(f"{loaded.name} on {loaded.model.device}: {loaded.source}", err=True)
    agree = True
    result: dict[str, Any] = {"model": loaded.name, "source": loaded.source, "prompt": text}
    if compare:
        from labsupport.models import compare_attention

        backends = ("standard", "flash" if chosen in ("standard", "auto") else chosen)
        comparison = compare_attention(
            loaded.model,
            loaded.tokenizer,
            text,
            backends=backends,
            max_new_tokens=max_new_tokens,
            chat=chat,
        )
        typer.echo(comparison.generations[backends[1]].text)
        typer.echo(f"\n{comparison}")
        result |= _comparison_as_json(comparison)
        agree = comparison.agree
    else:
        options: dict[str, Any] = {
            "cache": cache,
            "temperature": temperature,
            "top_k": top_k,
            "seed": seed,
            "chat": chat,
        }
        prompts = [text] * batch
        if warm_up:
            first = min(2, max_new_tokens)
            generate(loaded.model, loaded.tokenizer, prompts, max_new_tokens=first, **options)
        done = generate(
            loaded.model,
            loaded.tokenizer,
            prompts,
            max_new_tokens=max_new_tokens,
            on_step=_print_step if verbose > 1 else None,
            **options,
        )
        # Greedy rows of one prompt are all the same.
        for index, answer in enumerate(done.texts if temperature else done.texts[:1], 1):
            typer.echo(f"[{index}] {answer}" if batch > 1 and temperature else answer)
        typer.echo(f"\n{done}")
        result |= _generation_as_json(done)
    if json_file is not None:
        result["provenance"] = provenance(loaded.model.device)
        text = json.dumps(_as_json(result), indent=2, ensure_ascii=False, allow_nan=False)
        json_file.write_text(text + "\n", "utf-8")
    if not agree:
        raise typer.Exit(1)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise ValueError("give a prompt, or --prompt-file FILE (one of them)")
    if file is None:
        return str(prompt)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error.reason}") from None


def _check_json(file: Path | None) -> None:
    """Refuse a file that could not be written, before anything long begins."""
    if file is None:
        return
    if file.exists():
        raise FileExistsError(f"{file} exists: choose another name for --json")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} to write {file.name} to")
    if not os.access(file.parent, os.W_OK):
        raise PermissionError(f"the folder {file.parent} cannot be written to")


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    known = ("float32", "bfloat16", "float16", "float64")
    if name is None:
        return None
    if name not in known:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(known)}")
    return getattr(torch, name)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("labsupport.models")
    log.addHandler(handler)
    log.setLevel(logging.INFO)


def _print_step(step: int, tokens: Any, seconds: float) -> None:
    kind = "prefill" if step == 0 else f"step {step}"
    typer.echo(f"{kind}: {1e3 * seconds:.2f} ms, tokens {tokens.tolist()}", err=True)


def _generation_as_json(done: Generation) -> dict[str, Any]:
    rates = ("new_tokens", "prefill_tokens_per_s", "decode_tokens_per_s")
    return asdict(done) | {name: getattr(done, name) for name in rates}


def _comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    names = ("max_difference", "bound", "oracle", "parted_at", "gap", "near_tie")
    record = {name: getattr(comparison, name) for name in (*names, "same_text", "agree")}
    record["table"] = comparison.table.to_dict("records")
    record["generations"] = {
        name: _generation_as_json(done) for name, done in comparison.generations.items()
    }
    return record


def _as_json(value: Any) -> Any:
    """JSON has no NaN (no decode step, no rate), and no infinity."""
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
