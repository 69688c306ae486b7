"""The command `labsupport generate`: PyTorch is imported when it runs, not with this file."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from labsupport.models.generation.generate import Generation

Option = typer.Option
SUMMARY = "Summarise the text above in three sentences."


def generate_command(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, Option(help="Read the prompt from a file.")] = None,
    document: Annotated[
        Path | None,
        Option(help="A text file, or a folder, to ask about. Default prompt: for a summary of it."),
    ] = None,
    model: Annotated[
        str,
        Option(help="A known name (smollm2, stories15m, gpt2), a folder, a .bin file, a hub id."),
    ] = "smollm2",
    tokenizer: Annotated[
        str | None,
        Option(help="A file (tokenizer.bin, .model, tokenizer.json), a folder or a known name."),
    ] = None,
    attention: Annotated[
        str | None,
        Option(
            help="standard, flash (any IO-aware backend), auto, or a backend's name. "
            "Default: the environment variable LABSUPPORT_ATTENTION, else auto."
        ),
    ] = None,
    max_new_tokens: Annotated[int, Option(min=0, help="0 runs the prefill alone.")] = 64,
    cache: Annotated[
        str,
        Option(
            help="dynamic, static, graphed (the lab's loop for GPUs), or auto: the fastest here."
        ),
    ] = "auto",
    batch: Annotated[int, Option(min=1, help="Run this many copies of the prompt together.")] = 1,
    temperature: Annotated[float, Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[
        int | None, Option(min=1, help="Sample among this many likeliest tokens.")
    ] = None,
    seed: Annotated[int, Option(min=0, help="Of the sampling.")] = 0,
    dtype: Annotated[
        str | None, Option(help="float32, bfloat16, float16. Default: what suits the device.")
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda. Default: the GPU, if any.")] = None,
    chat: Annotated[
        bool | None,
        Option(
            "--chat/--no-chat",
            help="Wrap the prompt as a message, for models with a chat template, instead of "
            "continuing it. Default: with --document.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        Option("--compare", help="Also run standard attention, and compare the two."),
    ] = False,
    warm_up: Annotated[
        bool, Option("--warm-up", help="Run once before the run that is timed.")
    ] = False,
    verbose: Annotated[
        int,
        Option("--verbose", "-v", count=True, help="Attention of the layers; -vv: time by step."),
    ] = 0,
    json_file: Annotated[
        Path | None, Option("--json", help="Also write the result to this file.")
    ] = None,
    download: Annotated[
        bool, Option("--download", help="Fetch the model if it is not here.")
    ] = False,
) -> None:
    """Continue a text, or answer with --chat; report speed, memory and the attention that ran.

    \b
    labsupport generate "Once upon a time" -v
    labsupport generate "What is attention?" --chat
    labsupport generate --prompt-file long.txt --attention flash --compare
    labsupport generate "Who wrote this, and when?" --document letter.txt
    """
    if document is not None and prompt is None and prompt_file is None:
        prompt = SUMMARY
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give a prompt, or --prompt-file FILE (one of them)")
    text = read_text(prompt_file) if prompt_file else str(prompt)
    if document is not None:
        from labsupport.training.data import documents_from

        texts = [read.text.strip() for read in documents_from([document])]
        text = "\n\n".join([*texts, text])
    if compare and (temperature or batch > 1 or cache not in ("auto", "dynamic")):
        raise ValueError(
            "--compare takes one greedy text with the dynamic cache: "
            "leave out --temperature, --batch and --cache"
        )
    dtypes = ("float32", "bfloat16", "float16", "float64")
    if dtype not in (None, *dtypes):
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(dtypes)}")
    if json_file:  # a file that cannot be written is an error before anything long begins
        json_file.touch(exist_ok=False)
        json_file.unlink()
    log, layers = logging.getLogger("labsupport.models"), LayersTogether()
    if verbose:
        log.addHandler(layers)
        log.setLevel(logging.INFO)

    import torch
    from tqdm import tqdm

    from labsupport.models import compare_attention, generate, load_model
    from labsupport.models.generation.generate import fastest_cache
    from labsupport.models.integration import chosen_attention
    from labsupport.profiling.provenance import provenance

    chosen = chosen_attention(attention)
    loaded = load_model(
        model,
        tokenizer=tokenizer,
        attention=chosen,
        dtype=getattr(torch, dtype) if dtype else None,
        device=device,
        download=download,
    )
    pair = loaded.model, loaded.tokenizer
    if chat is None:
        chat = document is not None and bool(getattr(loaded.tokenizer, "chat_template", None))
    typer.echo(f"{loaded.name} on {loaded.model.device}: {loaded.source}", err=True)
    result: dict[str, Any] = {"model": loaded.name, "source": loaded.source, "prompt": text}
    if compare:
        second = "flash" if chosen in ("standard", "auto") else chosen
        both = compare_attention(
            *pair, text, backends=("standard", second), max_new_tokens=max_new_tokens, chat=chat
        )
        layers.flush()
        typer.echo(f"{both.generations[second].text}\n\n{both}")
        result |= {name: getattr(both, name) for name in both.__dataclass_fields__}
        result |= {"same_text": both.same_text, "agree": both.agree}
        result["table"] = both.table.to_dict("records")
        result["generations"] = {name: _as_dict(one) for name, one in both.generations.items()}
    else:
        prompts = [text] * batch
        options: dict[str, Any] = {"cache": cache, "chat": chat}
        options |= {"temperature": temperature, "top_k": top_k, "seed": seed}
        if warm_up:
            generate(*pair, prompts, max_new_tokens=min(2, max_new_tokens), **options)
        fastest = fastest_cache(loaded.model, steps=verbose > 1)
        # The graphed loop does not stop after each step. None: a bar on a terminal alone.
        without = verbose > 1 or "graphed" in (cache, fastest if cache == "auto" else "") or None
        with tqdm(total=max_new_tokens, unit="token", leave=False, disable=without) as bar:
            options["on_step"] = _print_step if verbose > 1 else None
            if not bar.disable:
                options["on_step"] = lambda *step: bar.update()
            done = generate(*pair, prompts, max_new_tokens=max_new_tokens, **options)
        layers.flush()
        # Greedy rows of one prompt are equal.
        for index, answer in enumerate(done.texts if temperature else done.texts[:1], 1):
            typer.echo(f"[{index}] {answer}" if batch > 1 and temperature else answer)
        typer.echo(f"\n{done}")
        if fastest == "graphed" != done.cache:
            typer.echo("hint: --cache graphed has the fastest steps here", err=True)
        result |= _as_dict(done)
    if json_file:
        result["provenance"] = provenance(loaded.model.device)
        written = json.dumps(_without_nan(result), indent=2, ensure_ascii=False, allow_nan=False)
        json_file.write_text(written + "\n", "utf-8")
    if not result.get("agree", True):
        raise typer.Exit(1)


class LayersTogether(logging.Handler):
    """Handler of the log of layers: layers with the same attention share a line on stderr."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[tuple[str, str], list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what `labsupport.models.integration.trace.note` says of a layer."""
        kind, layer, backend = map(str, record.args or ())
        self.layers.setdefault((kind, backend), []).append(layer)

    def flush(self) -> None:
        """Print a line for each kind of attention."""
        from labsupport.models.integration.trace import ranges

        for (kind, backend), layers in self.layers.items():
            numbers = [int(layer.split()[1]) for layer in layers if layer.startswith("layer ")]
            named = f"layers {ranges(numbers)}" if numbers else ", ".join(dict.fromkeys(layers))
            typer.echo(f"Using {kind} for {named} ({backend})", err=True)
        self.layers.clear()


def read_text(path: Path) -> str:
    """Read a prompt; raise ValueError for a file that is no text in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a text file in UTF-8: byte {error.start} does not fit. Save it in that "
            "encoding"
        ) from None


def _print_step(step: int, tokens: Any, seconds: float) -> None:
    kind = f"step {step}" if step else "prefill"
    typer.echo(f"{kind}: {1e3 * seconds:.2f} ms, tokens {tokens.tolist()}", err=True)


def _as_dict(done: Generation) -> dict[str, Any]:
    rates = ("new_tokens", "prefill_tokens_per_s", "decode_tokens_per_s")
    return asdict(done) | {name: getattr(done, name) for name in rates}


def _without_nan(value: Any) -> Any:
    """Replace NaN (the rate without a decode step) by None: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
