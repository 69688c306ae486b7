"""What notebook 3 runs on several processes: functions for `launch`, a small result of each rank.

    ring_on_ranks   ring attention against one device: errors, losses, spans of time, memory
    step_memory     the memory alone: also in the notebook's own process, as a ring of one
    train_on_ranks  DDP with and without no_sync, and FSDP: what is sent, and what is held
    leave           a run in which one rank is killed

They compute on the CPU wherever they run, so that they need no second device. Results are lists of
rows, plain dicts: pandas makes a table of them where it is imported anyway.
"""

from labsupport.distributed.lessons.ring import joined, ring_on_ranks, step_memory
from labsupport.distributed.lessons.training import leave, train_on_ranks

__all__ = ["joined", "leave", "ring_on_ranks", "step_memory", "train_on_ranks"]
