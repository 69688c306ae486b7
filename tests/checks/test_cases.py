import io

import pytest
import torch

from labsupport import checks
from labsupport.checks import decoding, flash, intensity, merging, planning
from labsupport.checks.cases import check_cases, export_cases
from labsupport.checks.verdict import mutant
from tests.checks.solutions import diagnosis, function, solution_source

FORWARD = (checks.check_forward_values, checks.check_forward_edges)
MASKS = (checks.check_visible_positions, checks.check_visible_padding)
BYTES = (checks.check_kept_blocks, checks.check_kept_checkpoint, checks.check_kept_loss)
EXERCISES = {
    "1-4": (FORWARD, flash.flash_forward, flash.FORWARD_MISTAKES, "my_flash_forward"),
    "2-3": (MASKS, decoding.visible, decoding.MISTAKES, "visible"),
    "3-3": (BYTES, planning.held_bytes, planning.MISTAKES, "kept_bytes"),
    "3-4": ((checks.check_merge_all,), merging.merge_all, merging.ALL_MISTAKES, "merge_all"),
    "4-1": (
        (checks.check_cost_bytes,),
        intensity.attention_cost,
        intensity.BYTE_MISTAKES,
        "attention_cost",
    ),
}
CELLS = {"1-4": "ex-1-4-tiled-forward", "2-3": "ex-2-3-decoding-mask", "3-3": "ex-3-3-kept-bytes", "3-4": "ex-3-4-merge", "4-1": "ex-4-1-cost"}  # fmt: skip


@pytest.mark.parametrize("exercise", EXERCISES)
def test_stored_cases_pass_the_solution_and_name_each_mistake(exercise, capsys):
    exported, solution, mistakes, name = EXERCISES[exercise]
    file = io.BytesIO()
    torch.save(export_cases(exported, solution, mistakes), file)
    file.seek(0)
    cases = torch.load(file, weights_only=False)
    check_cases(function(solution_source(f"0{exercise[0]}", CELLS[exercise]), name), cases)
    assert capsys.readouterr().out.startswith("[ok]")
    for mistake in mistakes:
        assert mistake.say in diagnosis(check_cases, mutant(solution, mistake.edit), cases=cases)


def test_an_unknown_mistake_is_located():
    cases = export_cases(MASKS, decoding.visible, decoding.MISTAKES)
    wrong = mutant(decoding.visible, ("return mask", "return mask.roll(1, -2)"))
    assert diagnosis(check_cases, wrong, cases=cases) == "the result of stored case 0 is wrong."
