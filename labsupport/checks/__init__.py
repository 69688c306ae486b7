"""Checks of the exercises, which name the likely mistake.

Each check takes the student's function, calls it on its own inputs and prints one `[ok]` line,
or raises `CheckFailed` with a diagnosis. `seed` draws other inputs.

    textbook   exercises 1-1 and 1-2
    softmax    exercise 1-3
    flash      exercises 1-4 and 1-5
    dtypes     exercise 1-6
    layout     exercise 2-1
    registered exercise 2-2, with small_models to put a function into
    decoding   exercise 2-3
    amdahl     exercise 2-4
    policies   exercise 2-5
    rotary     exercise 3-1
    chunked_loss exercise 3-2
    planning   exercise 3-3
    merging    exercise 3-4
    zigzag_order exercise 3-5
    intensity  exercise 4-1
    counting   exercise 4-2
    kernel     exercise 4-3: the update of a Triton kernel
    fitting    exercise 4-4
    choosing   exercise 4-5
    verdict    judges results, and finds the mistake by running edits of the reference solution
    counting_numbers  the same for returned numbers instead of tensors
    cases      stores what checks ask, with the results of the solution and of each mistake

An exercise's file holds its reference solution, its mistakes as edits of that solution with the
sentence that names each, and its checks.
"""

from labsupport.checks.amdahl import (
    check_amdahl,
    check_attention_share,
    flop_share,
    overall_speedup,
)
from labsupport.checks.choosing import (
    check_choice_limits,
    check_choice_sources,
    check_choice_ties,
    choose,
)
from labsupport.checks.chunked_loss import (
    check_loss_gradients,
    check_loss_memory,
    check_loss_values,
)
from labsupport.checks.counting import (
    check_textbook_traffic,
    check_tiled_causal,
    check_tiled_traffic,
    textbook_traffic,
    tiled_traffic,
)
from labsupport.checks.decoding import (
    check_visible_decoding,
    check_visible_padding,
    check_visible_positions,
)
from labsupport.checks.dtypes import (
    check_half_attention,
    check_half_dtype_edges,
    check_half_dtype_values,
)
from labsupport.checks.fitting import (
    check_fit,
    check_held_out,
    check_predict,
    fit_time,
    held_out_error,
    predict_time,
)
from labsupport.checks.flash import (
    check_backward_edges,
    check_backward_memory,
    check_backward_values,
    check_forward_edges,
    check_forward_lse,
    check_forward_memory,
    check_forward_values,
)
from labsupport.checks.intensity import (
    attention_cost,
    check_cost_bytes,
    check_cost_flops,
    check_roof,
    roof,
)
from labsupport.checks.kernel import check_update_dtype, check_update_extremes, check_update_values
from labsupport.checks.layout import check_flash_layout, check_split_heads, check_split_qkv
from labsupport.checks.merging import check_merge_all, check_merge_edges, check_merge_values
from labsupport.checks.planning import (
    check_kept_blocks,
    check_kept_checkpoint,
    check_kept_loss,
    held_bytes,
)
from labsupport.checks.policies import check_policy_devices, check_policy_memory, check_policy_range
from labsupport.checks.registered import (
    check_registered_memory,
    check_registered_models,
    check_registered_refusals,
    check_registered_values,
)
from labsupport.checks.rotary import (
    check_rope_angles,
    check_rope_conventions,
    check_rope_positions,
    check_rope_values,
)
from labsupport.checks.softmax import (
    check_running_extremes,
    check_running_streams,
    check_running_values,
)
from labsupport.checks.textbook import (
    check_largest_length,
    check_score_bytes,
    check_textbook_empty_rows,
    check_textbook_mask,
    check_textbook_values,
)
from labsupport.checks.verdict import CheckFailed
from labsupport.checks.yours import compare_prediction, yours_or_ours
from labsupport.checks.zigzag_order import (
    check_unzigzag,
    check_zigzag_chunks,
    check_zigzag_positions,
)
