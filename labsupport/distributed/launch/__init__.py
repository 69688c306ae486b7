"""Run a function or a script in several processes of this machine, and come back whatever happens.

    launch      start them, show rank 0's output, raise one error if one of them fails
    target      what is to be run: a script, a module, or a function in one of them
    processes   one process: started, asked how it is, ended
    output      what the processes print, as it comes
    errors      which of them failed first, and what to say about it
    worker      what runs inside each process

    python -m labsupport.distributed.launch --processes 2 train.py --steps 10

A script that runs here runs under `torchrun --nproc-per-node 2 train.py` too: it finds the same
environment variables. What this adds is meant for a notebook: functions and what they return, one
readable error, and no wait for a process that will never answer.
"""

from labsupport.distributed.launch.errors import LaunchError
from labsupport.distributed.launch.launch import launch

__all__ = ["LaunchError", "launch"]
