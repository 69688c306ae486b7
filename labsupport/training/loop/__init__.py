"""The training loop: deterministic by step, so that a run that was killed continues exactly.

settings      what a run is told, and the learning rate as a function of the step
loop          one optimizer step, and the run of them
checkpoints   a run on disk: whole or not there, and damage is seen
history       what each step did, as a table and as a chart
data          the texts that `labsupport train` knows by name
messages      what that command says
"""

from labsupport.training.loop.checkpoints import CheckpointError, Checkpoints, CheckpointWarning
from labsupport.training.loop.history import History, StepRow
from labsupport.training.loop.inputs import ResumeError, tensors
from labsupport.training.loop.loop import TrainingDivergedError, train
from labsupport.training.loop.settings import TrainSettings, learning_rate

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "History",
    "ResumeError",
    "StepRow",
    "TrainSettings",
    "TrainingDivergedError",
    "learning_rate",
    "tensors",
    "train",
]
