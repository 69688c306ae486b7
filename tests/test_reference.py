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
from book.reference import (
    FOLDER,
    ROOMS,
    VALUES,
    command_page,
    public_names,
    reference_pages,
    room_page,
)
from labsupport.attention import implementations
from labsupport.cli import app

# Names that courses already teach; see CONTRIBUTING.md.
TAUGHT = {
    "standard_attention", "FlashAttentionFunction", "TritonFlashAttentionFunction",
    "PrecisionTracker", "auto_fix_precision_for_flash_attention", "safe_flash_attention",
    "FlashAttentionConfig", "compute_loss", "apply_precision_policy", "MixedPrecisionLayerNorm",
    "ring_flash_attn_func", "triton_ring_flash_attn_func", "zigzag_ring_flash_attn_func",
    "setup_ddp", "cleanup_ddp", "train_with_ddp", "train_with_fsdp",
}  # fmt: skip


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
    implementations.own.clear()  # of register_backend's example
    assert runner.failures == 0


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_an_entry_and_a_description(room):
    page, names = room_page(room), public_names(room)
    assert names
    assert {*re.findall(r"^\.\. (?:auto|py:)\w+:: (\w+)$", page, re.MULTILINE)} == {*names}
    module = getattr(labsupport, room)
    assert [n for n in names if not (VALUES.get(n) or inspect.getdoc(getattr(module, n)))] == []


def test_what_readme_notebooks_and_courses_use_has_an_example(project):
    texts = [project / "README.md", *(project / "notebooks").glob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(t.read_text(encoding="utf-8") for t in texts)))
    rooms = [room for room in ROOMS if room != "checks"]  # its examples are the exercises
    wanted = {*TAUGHT, *(n for room in rooms for n in public_names(room) if n in words)} - {*VALUES}
    shown = {name for room in rooms for name, tests in examples(room).items() if tests}
    assert sorted(wanted - shown) == []


def test_every_command_has_an_entry_with_all_of_its_options():
    page = command_page()

    def check(command, name):
        if command.hidden:
            return
        section = page.partition(f"`{name}`\n")[2].partition("\n#")[0]
        assert section or name == "labsupport", name
        for option in command.params if section else ():
            spelled = option.opts[0] if option.opts[0].startswith("-") else option.name
            assert spelled in section, (name, spelled)
        for own, sub in getattr(command, "commands", {}).items():
            check(sub, f"{name} {own}")

    check(typer.main.get_command(app), "labsupport")
    assert "* [`bench`](#labsupport-bench): Measure one" in page
    assert "* [`bench`](#labsupport-ring-bench): Time" in page


def test_the_index_leads_to_every_name_and_command():
    index = dict(reference_pages())[FOLDER / "index.rst"]
    for room in ROOMS:
        for name in public_names(room):
            assert f"<labsupport.{room}.{name}>`: " in index
    for command in ("doctor", "bench", "ring check", "train"):
        assert f":ref:`labsupport {command} <" in index
