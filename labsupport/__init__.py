"""FlashAttention, to read, to build and to measure: the package that the notebooks import.

`import labsupport` alone imports nothing else, not even torch; each subpackage is imported when it
is first named::

    import labsupport
    labsupport.attention.standard_attention  # imports labsupport.attention, and with it torch
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules=[
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
    ],
)
