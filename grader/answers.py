"""Which modules of the package answer an exercise, and what becomes of each in an exam.

Three kinds, by one rule: what nothing but the exercise needs is left out; what the notebooks'
other cells or the checks run on stays in a form that is not readable at a glance; what only *uses*
an answer stays as it is. A file that is not listed here is given out as it is.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A module of the package that holds the answer to an exercise.

    Attributes:
        path: the file, relative to the package; a folder stands for all Python files in it.
        exercise: which exercise, for the message.
        sealed: whether it stays, unreadable, in the edition for students. Where the student's
            notebook is graded it is left out like the others.
        needed: names that stay as they are wherever the rest is left out, because others use them.
        gone: names that are left out even where the rest is sealed.
        always: whether it is sealed where notebooks are graded too: the package runs on it.
        gone_in_grading: names that are left out even then.
    """

    path: str
    exercise: str
    sealed: bool = False
    needed: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    always: bool = False
    gone_in_grading: tuple[str, ...] = ()


_KERNELS = ("forward", "backward", "hopper", "decode", "version1", "forward_gluon")

ANSWERS: tuple[Answer, ...] = (
    # Left out. `attention` then passes over the lab's own two backends.
    Answer("attention/flash_torch.py", "1-4, 1-5", needed=("autocast_off", "_block_sizes")),
    *(Answer(f"attention/kernels/{name}.py", "4-3") for name in _KERNELS),
    Answer(
        "attention/kernels/template.py",
        "4-3",
        needed=("with_update_kernel", "attention_with_update", "run_update"),
    ),
    Answer("distributed/ring/merge_kernel.py", "3-4"),
    Answer("distributed/minimal_ring.py", "3-4"),
    # Sealed: models, lessons, measurements and checks run on them.
    Answer(
        "attention/online_softmax.py",
        "1-3, 3-4",
        sealed=True,
        gone=("online_softmax", "accumulate_block"),
    ),
    Answer("attention/reference.py", "1-1", sealed=True),
    Answer("attention/masks.py", "2-3", sealed=True, always=True),
    Answer("attention/rotary.py", "3-1", sealed=True),
    Answer("profiling/work.py", "4-1", sealed=True),
    Answer("profiling/tables.py", "1-2", sealed=True),
    Answer("precision/autofix.py", "1-6", sealed=True),
    Answer("precision/losses.py", "3-2", sealed=True),
    Answer("analysis/traffic", "4-2", sealed=True),
    Answer("analysis/tiles.py", "4-2", sealed=True),
    Answer("analysis/roofline.py", "4-1", sealed=True),
    Answer("analysis/recommend.py", "4-5", sealed=True),
    Answer("analysis/predictor/calibration.py", "4-4", sealed=True),
    Answer("analysis/predictor/evaluate.py", "4-4", sealed=True),
    Answer("analysis/predictor/work.py", "4-1", sealed=True),
    Answer("models/flops.py", "2-4", sealed=True),
    Answer(
        "models/integration/functions.py",
        "2-2",
        sealed=True,
        always=True,
        gone_in_grading=("_batched", "_packed"),
    ),
    Answer("models/integration/masks.py", "2-3", sealed=True),
    Answer("models/llama2c.py", "3-1", sealed=True),
    Answer("training/memory.py", "3-2", sealed=True),
    Answer("training/planner/formulas.py", "3-3", sealed=True),
    Answer("distributed/ring/merging.py", "3-4", sealed=True),
    Answer("distributed/ring/zigzag.py", "3-5", sealed=True),
)

# Of the checks, these know no answer. The others compare with one, so they are all sealed, or
# replaced by stored cases.
CHECKS_AS_THEY_ARE = ("__init__.py", "cases.py", "verdict.py", "yours.py")
