"""Checks of the exercises, which name the likely mistake.

Each check takes the student's function, calls it on its own inputs and prints one `[ok]` line,
or raises `CheckFailed` with a diagnosis. `seed` draws other inputs. An exercise's file holds its
reference solution, its mistakes as edits of that solution with their diagnoses, and its checks:

    1-1, 1-2 textbook    1-3 softmax       1-4, 1-5 flash    1-6 dtypes
    1-7 eight_bits       1-8 lookahead
    2-1 layout           2-2 registered    2-3 decoding      2-4 amdahl      2-5 policies
    2-6 caching          2-7 flex          2-8 nan_layer     2-9 loss_scaling
    3-1 rotary           3-2 chunked_loss  3-3 planning      3-4 merging     3-5 zigzag_order
    3-6 data_parallel    3-7 ring_backward 3-8, 4-6 faults   3-9 long_positions
    4-1 intensity        4-2 counting      4-3 kernel        4-4 fitting     4-5 choosing
    4-3 triton_kernels   4-7 two_tricks    4-8 profiles

`verdict` judges results and finds the mistake. A check calls its reference by `cases.reference`, so
that stored results can take the place of the solutions in an exam.
"""

from labsupport.checks.amdahl import (
    check_amdahl,
    check_attention_share,
    flop_share,
    overall_speedup,
)
from labsupport.checks.caching import (
    check_cache_growth,
    check_cache_values,
    check_gather_pages,
    check_quantise_keys,
    check_split_decode,
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
from labsupport.checks.data_parallel import (
    check_average_each,
    check_average_in_buckets,
    check_buckets,
    check_overlap,
    check_sharded_layer,
    check_sharded_memory,
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
from labsupport.checks.eight_bits import (
    check_fp8_blocks,
    check_fp8_tensor,
    check_hadamard,
    check_rotation,
    rotate,
    round_to_fp8,
)
from labsupport.checks.faults import check_accumulation, check_clock
from labsupport.checks.fitting import (
    check_fit,
    check_held_out,
    check_predict,
    fit_time,
    held_out_error,
    predict_time,
)
from labsupport.checks.flash import (
    check_backward_dv,
    check_backward_edges,
    check_backward_memory,
    check_backward_values,
    check_forward_edges,
    check_forward_lse,
    check_forward_memory,
    check_forward_rows,
    check_forward_values,
    check_score_gradient,
)
from labsupport.checks.flex import (
    alibi,
    causal_mask,
    check_alibi,
    check_causal_mask,
    check_document_mask,
    check_soft_cap,
    check_tile_counts,
    check_window_mask,
    document_mask,
    soft_cap,
    tile_counts,
    window_mask,
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
from labsupport.checks.long_positions import check_interpolated, check_ntk_aware, check_yarn
from labsupport.checks.lookahead import check_leak_cause, check_leaking_rows, check_recall
from labsupport.checks.loss_scaling import (
    check_largest_scale,
    check_lost_share,
    check_master_step,
    check_next_scale,
    check_unscale,
)
from labsupport.checks.merging import check_merge_all, check_merge_edges, check_merge_values
from labsupport.checks.nan_layer import check_careful_attention, check_nan_cause
from labsupport.checks.planning import (
    check_kept_blocks,
    check_kept_checkpoint,
    check_kept_loss,
    held_bytes,
)
from labsupport.checks.policies import check_policy_devices, check_policy_memory, check_policy_range
from labsupport.checks.profiles import check_launch_gap, check_stall, launch_gap, stall
from labsupport.checks.registered import (
    check_registered_memory,
    check_registered_models,
    check_registered_refusals,
    check_registered_values,
)
from labsupport.checks.ring_backward import check_ring_backward
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
from labsupport.checks.triton_kernels import (
    check_triton_add,
    check_triton_flash_edges,
    check_triton_flash_skips,
    check_triton_flash_values,
    check_triton_softmax,
)
from labsupport.checks.two_tricks import (
    check_exp2_bits,
    check_lazy_edges,
    check_lazy_update,
    check_smallest_degree,
    exp2_by_bits,
    lazy_update,
    smallest_degree,
)
from labsupport.checks.verdict import CheckFailed
from labsupport.checks.yours import compare_prediction, solution_or_reference
from labsupport.checks.zigzag_order import (
    check_unzigzag,
    check_zigzag_chunks,
    check_zigzag_positions,
)

__all__ = [name for name, value in globals().items() if callable(value) and name[0] != "_"]

yours_or_ours = solution_or_reference  # its name in older copies of the notebooks
