"""Calls that make no sense are refused by a sentence, before anything is measured or started."""

import shlex

import pytest
import torch

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
    f"{TRAIN} --steps 0": "steps is 0",
    f"{TRAIN} --batch 0": "at least 1",
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


def test_torchrun_has_chosen_the_number_of_processes():
    done = program(*RING.split(), ok=False, env={"RANK": "0", "WORLD_SIZE": "4"})
    assert "torchrun has started 4 processes: leave --processes out" in str(done.exception)
    if not torch.cuda.is_available():
        done = program(*DDP.split(), "--device", "cuda", ok=False)
        assert "--device cuda: each rank needs a GPU, but PyTorch finds 0" in str(done.exception)
