"""The maintainers' measurements: what data/runs holds, what tunes kernels, what compares."""
