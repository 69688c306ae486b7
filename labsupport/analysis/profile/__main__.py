"""One attention call, for a profiler that looks at it from outside.

python -m labsupport.analysis.profile '{"backend": "flex", "seqlen": 1024}'

Three warm-up calls come first. The call that counts stands between cudaProfilerStart and
cudaProfilerStop.
"""

import json
import sys

import torch

from labsupport.profiling import Case
from labsupport.profiling.benchmark import call_of, make_inputs

case = Case(**json.loads(sys.argv[1]))
call = call_of(case, make_inputs(case, torch.device("cuda")))
for _ in range(3):
    call()
torch.cuda.synchronize()
torch.cuda.profiler.start()
call()
torch.cuda.synchronize()
torch.cuda.profiler.stop()
