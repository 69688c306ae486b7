"""The reference: every public name and every command has its entry, and every example runs."""

import doctest
import inspect
import re
import warnings
from functools import cache

import pytest
import torch
import typer

import labsupport
from book.reference import ROOMS, VALUES, command_page, public_names, reference_pages, room_page
from labsupport.cli import app

# Names that courses already teach; see CONTRIBUTING.md.
TAUGHT = """
standard_attention FlashAttentionFunction TritonFlashAttentionFunction PrecisionTracker
auto_fix_precision_for_flash_attention safe_flash_attention FlashAttentionConfig compute_loss
apply_precision_policy MixedPrecisionLayerNorm ring_flash_attn_func triton_ring_flash_attn_func
zigzag_ring_flash_attn_func setup_ddp cleanup_ddp train_with_ddp train_with_fsdp
""".split()


@cache
def examples(room):
    """The examples of a room, by name, in the namespace that the reference promises."""
    module = getattr(labsupport, room)
    names = {name: getattr(module, name) for name in public_names(room)}
    finder = doctest.DocTestFinder(exclude_empty=True)
    return {
        name: [
            test
            for test in finder.find(value, name, module=False, globs={"torch": torch, **names})
            if test.examples
        ]
        for name, value in names.items()
        if name not in VALUES
    }


@pytest.mark.parametrize("room", ROOMS)
def test_every_example_runs(room):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tests in examples(room).values():
            for test in tests:
                torch.manual_seed(0)
                runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_an_entry_and_a_description(room):
    page, names = room_page(room), public_names(room)
    assert names
    assert {*re.findall(r"^\.\. (?:auto|py:)\w+:: (\w+)$", page, re.MULTILINE)} == {*names}
    module = getattr(labsupport, room)
    assert [n for n in names if not (VALUES.get(n) or inspect.getdoc(getattr(module, n)))] == []
