"""FlashAttention, to read, to build and to measure: the package that the notebooks import.

`import labsupport` alone imports nothing else, not even torch; each subpackage is imported when it
is first named::

    import labsupport
    labsupport.attention.standard_attention  # imports labsupport.attention, and with it torch
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

_SUBMODULES = (
    "analysis",
    "attention",
    "checks",
    "cli",
    "commands",
    "course",
    "distributed",
    "models",
    "paths",
    "plotting",
    "precision",
    "profiling",
    "training",
)

__all__ = ["__version__", *_SUBMODULES]


def __getattr__(name: str) -> ModuleType:
    """Import a subpackage when it is first used (PEP 562).

    Raises:
        AttributeError: `name` is no part of the lab.
    """
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"labsupport has no {name!r}; it has {', '.join(_SUBMODULES)}")


def __dir__() -> list[str]:
    """Name the subpackages too, so that completion finds those not imported yet."""
    return sorted(__all__)
