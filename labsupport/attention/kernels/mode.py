"""Compiled or interpreted kernels: chosen before Triton is imported, because Triton decides then.

Triton reads TRITON_INTERPRET when a kernel is defined, its own library of kernels included. PyTorch
imports Triton along the way, so `labsupport.attention` calls `settle` first.
"""

import os
import sys
from importlib.util import find_spec

import numpy as np
import torch

VARIABLE = "TRITON_INTERPRET"


def settle() -> None:
    """Ask for the interpreter where there is no GPU, unless that has been decided already."""
    if VARIABLE not in os.environ and "triton" not in sys.modules and not torch.cuda.is_available():
        os.environ[VARIABLE] = "1"


def interpreted() -> bool:
    """Return whether the kernels of this process are interpreted."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def missing() -> str | None:
    """Return why the kernels cannot run here, or None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install 'labsupport[triton]' (Linux)"
    if not interpreted():
        if torch.cuda.is_available():
            return None
        return (
            "without a GPU the kernels run in Triton's interpreter only: import "
            f"labsupport.attention before other users of Triton, or set {VARIABLE}=1 before Python "
            "starts"
        )
    import triton
    import triton.language as tl

    if type(tl.cdiv).__name__ != "InterpretedFunction":
        return f"{VARIABLE} was set after Triton had been imported: set it before Python starts"
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        try:
            int(np.ones(1))  # loops of the interpreter do this, and NumPy 2.4 refuses
        except TypeError:
            return (
                f"the interpreter of Triton {triton.__version__} does not work with NumPy "
                f"{np.__version__}: pip install 'numpy<2.4', or Triton 3.7 and newer"
            )
    return None
