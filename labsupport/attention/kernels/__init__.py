"""GPU kernels, each in one file with its launcher."""
