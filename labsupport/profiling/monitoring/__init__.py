"""Memory of a block of code, or of any program, over time. Nothing here imports PyTorch.

sampler    the sampler, the context manager `labsupport.profiling.monitor`, findings as sentences
processes  memory of a process tree
gpu        the GPU's readings
gpu_state  one look at a GPU, with all that the health check judges
live       a view that renews itself: `labsupport monitor --live`
view       what it shows
recording  the samples, their peak and average
run        a program run under the sampler: `labsupport monitor -- COMMAND`
child      its signals, its terminal, its descendants
"""
