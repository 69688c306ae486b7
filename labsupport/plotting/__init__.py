"""Charts from DataFrames and pictures of the algorithm, in one style.

An implementation has the same colour and marker in every chart (colours of Okabe and Ito, and of
Paul Tol, distinct for readers with any colour vision).

    charts       time and memory against sequence length, and over time; predictions; rooflines
    explorer     the score matrix: weights, tiles; block sizes, fast memory and traffic
    precision    dtypes and magnitudes from layer to layer
    training     what fills the memory, how losses run, what a longer context brings
    distributed  who waits for whom, what more devices bring
    drawing      the vocabulary that charts share
    figure       a figure that shows and describes itself

Every function returns a matplotlib Figure: let it be the last expression of a cell. Nothing else of
the lab is imported here.
"""

from labsupport.plotting.charts import (
    RoofLine,
    plot_growth,
    plot_memory,
    plot_predictions,
    plot_roofline,
    plot_time,
)
from labsupport.plotting.distributed import plot_launches, plot_timeline
from labsupport.plotting.drawing import STYLES, Reference, style
from labsupport.plotting.explorer import (
    plot_block_mask,
    plot_kernel_walk,
    plot_rescalings,
    plot_tile_choices,
    plot_tile_pass,
    plot_tiles,
    plot_weights,
)
from labsupport.plotting.figure import Chart, alt_text
from labsupport.plotting.precision import plot_dtype_flow
from labsupport.plotting.training import (
    plot_by_window,
    plot_memory_parts,
    plot_training,
)

__all__ = [
    "STYLES",
    "Chart",
    "Reference",
    "RoofLine",
    "alt_text",
    "plot_block_mask",
    "plot_by_window",
    "plot_dtype_flow",
    "plot_growth",
    "plot_kernel_walk",
    "plot_launches",
    "plot_memory",
    "plot_memory_parts",
    "plot_predictions",
    "plot_rescalings",
    "plot_roofline",
    "plot_tile_choices",
    "plot_tile_pass",
    "plot_tiles",
    "plot_time",
    "plot_timeline",
    "plot_training",
    "plot_weights",
    "style",
]
