"""One call of one backend, for a profiler that looks at it from outside.

python -m labsupport.analysis.profile.one_call '{"backend": "flex", "seqlen": 1024}' cuda:0

Warm-up calls come first. On a GPU, the call that counts stands between cudaProfilerStart and
cudaProfilerStop.
"""

from __future__ import annotations

import json
import sys

import torch

from labsupport.analysis.profile.steps_traces import one_call
from labsupport.profiling.cases import Case
from labsupport.profiling.timing import resolve_device

WARMUP = 3


def main() -> None:
    """Make the call that the arguments describe: the fields of a `Case` in JSON, and a device."""
    case = Case(**json.loads(sys.argv[1]))
    device = resolve_device(sys.argv[2])
    call = one_call(case, device)
    for _ in range(WARMUP):
        call()
    if device.type != "cuda":
        call()
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
