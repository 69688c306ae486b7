"""Calls that make no sense are refused by a sentence, before anything is measured or started."""

import shlex
from typing import get_args, get_type_hints

import pytest
import torch

from labsupport.cli import app
from labsupport.commands.ring import ring_app
from tests.commands.program import program

TRAIN = "train --device cpu --preset 1x32 --length 128 --data records"
RING = f"{TRAIN} --parallel ring --processes 2"
DDP = f"{TRAIN} --parallel ddp --processes 2"
REFUSED = {
    "bench --preset gpt5": "gpt2-small",
    "bench --dtype int8": "int8",
    "bench --backend flash9 --device cpu": "flash9",
    "bench --check-baseline a --save-baseline b": "one at a time",
    "sweep --seqlen many": "such as 512",
    "sweep --chart time.bmp": ".png",
    "monitor": "which program",
    "monitor --live ls": "which program",
    "ring check --kernel flash": "there are cudnn, native",
    "ring check --heads 5": "--heads must be a multiple of --kv-heads",
    "ring bench --layouts stripes": "there are contiguous, zigzag",
    "ring bench --save no/name": "no name for a run",
    "ring bench --save ring-two-h200": "there is a run ring-two-h200",
    f"{TRAIN} --preset huge": "no preset 'huge'",
    f"{TRAIN} --data novels": "unknown data 'novels': give one of topics, ",
    f"{TRAIN} --tokens letters": "unknown tokens 'letters'",
    f"{TRAIN} --length '1 mile'": "no length",
    f"{TRAIN} --dtype int8": "--dtype 'int8'",
    f"{TRAIN} --save-memory all": "'all' saves no memory; known: checkpoint, ",
    f"{TRAIN} --save-memory loss=all": "'loss=all' saves no memory",
    f"{TRAIN} --save-memory states": "goes with --parallel fsdp",
    f"{TRAIN} --attention flesh": "flesh",
    f"{TRAIN} --length 0": "no length",
    f"{TRAIN} --length 9999999G": "no length",
    f"{TRAIN} --data topics --length 9999999999K": "below 2^31",
    f"{TRAIN} --data ''": "unknown data ''",
    f"{TRAIN} --data README.md,": "unknown data ''",
    f"{TRAIN} --seed 99999999999999999999": "seed is 9999",
    "monitor --device 999 -- true": "there are",
    f"{TRAIN} --length -8": "no length",
    f"{TRAIN} --length 1 --data topics": "length=1: at least",
    f"{TRAIN} --save-memory mlp=0": "mlp_chunk is 0",
    f"{TRAIN} --learning-rate 0": "learning_rate is 0",
    "sweep --seqlen 64,0": "seqlen must be a whole number, at least 1, got 0",
    "sweep --batch -1": "batch must be",
    "sweep --nheads ,": "such as 512",
    "ring bench --seqlen 512,-1": "--seqlen 512,-1: at least 1",
    "ring bench --kv-heads 0": "--heads must be a multiple",
    f"{TRAIN} --limit much": "'much' is not a size",
    f"{TRAIN} --parallel pipeline": "unknown --parallel 'pipeline'; known: ddp, fsdp, ring",
    f"{TRAIN} --processes 2": "--processes goes with --parallel ddp, fsdp or ring",
    f"{TRAIN} --parallel ring": "say how many processes",
    f"{RING} --data source": "packs several documents into a sequence",
    f"{RING} --attention sdpa_flash": "--attention 'sdpa_flash': a ring has auto, ",
    f"{DDP} --attention flesh": "flesh",
    f"{RING} --device cuda:1": "with --parallel it is cpu or cuda",
    f"{RING} --preset huge": "no preset 'huge'",
    DDP: "--accumulation 1 leaves some of 2 ranks without a sequence",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_makes_no_sense_is_refused(line):
    done = program(*shlex.split(line), ok=False)
    assert isinstance(done.exception, ValueError | OSError)
    assert REFUSED[line] in str(done.exception)


def numbers():
    """The program's options that take a number: the words to call it, and what the option says."""
    for group, path in ((app, ()), (ring_app, ("ring",))):
        for command in group.registered_commands:
            name = command.name or command.callback.__name__
            hints = get_type_hints(command.callback, include_extras=True)
            for argument, hint in hints.items():
                kind, *said = get_args(hint) or (None,)
                if said and {int, float} & {kind, *get_args(kind)} and not said[0].count:
                    yield (*path, name, f"--{argument.replace('_', '-')}"), said[0].min


def test_every_number_has_a_least_value_and_what_lies_below_is_refused():
    options = dict(numbers())
    for words, least in options.items():
        assert least is not None, words
        for wrong in (least - 1, "many"):
            done = program(*words, wrong, ok=False)
            assert done.exit_code == 2, (words, wrong)
            assert words[-1] in done.output
    assert len(options) > 40


def test_a_prompt_in_another_encoding_is_named(tmp_path):
    letter = tmp_path / "brief.txt"
    letter.write_bytes("Grüße".encode("latin-1"))
    for options in (("--prompt-file", letter), ("who?", "--document", letter)):
        done = program("generate", *options, ok=False)
        assert isinstance(done.exception, ValueError)
        assert "brief.txt is not a text file in UTF-8" in str(done.exception)


def test_torchrun_has_chosen_the_number_of_processes():
    done = program(*RING.split(), ok=False, env={"RANK": "0", "WORLD_SIZE": "4"})
    assert "torchrun has started 4 processes: leave --processes out" in str(done.exception)
    if not torch.cuda.is_available():
        done = program(*DDP.split(), "--device", "cuda", ok=False)
        assert "--device cuda: each rank needs a GPU, but PyTorch finds 0" in str(done.exception)
