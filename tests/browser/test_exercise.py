"""An exercise, solved as a student solves it: typed into the cell, wrong at first."""

import pytest

pytestmark = pytest.mark.browser

STUB = "def textbook_attention"
WRONG = """
scores = q @ k.mT
if mask is not None:
    scores = scores.masked_fill(~mask, -torch.inf)
weights = scores.softmax(dim=-1).nan_to_num(0.0)
return weights @ v, weights
"""


def test_a_wrong_solution_is_diagnosed_and_a_right_one_passes(lab, student, picture):
    student.open(lab, "01-Setup_and_Comparison.ipynb")
    student.run("environment_card()")

    student.run(STUB)
    said = student.run("checks.check_textbook_values(").inner_text()
    assert "Check failed: textbook_attention is not written yet" in said

    student.rewrite(STUB, "raise NotImplementedError", WRONG)
    student.run(STUB)
    said = student.run("checks.check_textbook_values(").inner_text()
    assert "The scores are not divided by sqrt(head_dim)" in said
    assert "Traceback" not in said
    student.show(student.find(STUB))
    picture("exercise")

    student.rewrite(STUB, "scores = q @ k.mT", "scores = q @ k.mT / math.sqrt(q.shape[-1])")
    student.run(STUB)
    said = student.run("checks.check_textbook_values(").inner_text()
    assert said.count("[ok]") == 3  # values, mask and empty rows
