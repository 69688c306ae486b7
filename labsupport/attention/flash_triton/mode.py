"""Compiled or interpreted: decided before Triton is imported, because Triton decides it then.

Triton reads TRITON_INTERPRET when a kernel is defined, its own library of kernels included. PyTorch
imports Triton along the way, so `labsupport.attention` settles the matter first of all.
"""

import os
import sys
from importlib.util import find_spec

import numpy as np
import torch

VARIABLE = "TRITON_INTERPRET"


def settle() -> None:
    """Ask for the interpreter where there is no GPU, unless somebody has decided already."""
    if VARIABLE not in os.environ and "triton" not in sys.modules and not torch.cuda.is_available():
        os.environ[VARIABLE] = "1"


def interpreted() -> bool:
    """Whether the kernels of this process are interpreted."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def missing() -> str | None:
    """Why the kernels cannot run here, or None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install -e '.[triton]' (Linux)"
    if not interpreted():
        if torch.cuda.is_available():
            return None
        return (
            "without a GPU the kernels run in Triton's interpreter only, and it was ruled out: "
            f"import labsupport.attention before other users of Triton, or set {VARIABLE}=1 before "
            "Python starts"
        )
    import triton
    import triton.language as tl

    if type(tl.cdiv).__name__ != "InterpretedFunction":
        return f"{VARIABLE} was set after Triton had been imported: set it before Python starts"
    if not _counts_with_numpy(triton.__version__):
        return (
            f"Triton {triton.__version__}'s interpreter does not get along with NumPy "
            f"{np.__version__}: pip install 'numpy<2.4', or Triton 3.7 and newer"
        )
    return None


def _counts_with_numpy(triton_version: str) -> bool:
    """Whether the interpreter's loops can count: before Triton 3.7 int() of a one-element array."""
    if tuple(int(part) for part in triton_version.split(".")[:2]) >= (3, 7):
        return True
    try:
        int(np.ones(1))  # NumPy 2.4 refuses
    except TypeError:
        return False
    return True
