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

The solution and its mistakes stand between `### BEGIN SOLUTION` and `### END SOLUTION`: where a
submission is graded, these lines are left out, and everything else still imports. `verdict` judges
results and finds the mistake.
"""

from typing import Any

import lazy_loader

__getattr__: Any
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "amdahl": [
            "check_amdahl",
            "check_attention_share",
            "flop_share",
            "overall_speedup",
        ],
        "caching": [
            "check_cache_growth",
            "check_cache_values",
            "check_gather_pages",
            "check_quantise_keys",
            "check_split_decode",
        ],
        "choosing": [
            "check_choice_limits",
            "check_choice_sources",
            "check_choice_ties",
            "choose",
        ],
        "chunked_loss": [
            "check_loss_gradients",
            "check_loss_memory",
            "check_loss_values",
        ],
        "counting": [
            "check_textbook_traffic",
            "check_tiled_causal",
            "check_tiled_traffic",
            "textbook_traffic",
            "tiled_traffic",
        ],
        "data_parallel": [
            "check_average_each",
            "check_average_in_buckets",
            "check_buckets",
            "check_overlap",
            "check_sharded_layer",
            "check_sharded_memory",
        ],
        "decoding": [
            "check_visible_decoding",
            "check_visible_padding",
            "check_visible_positions",
        ],
        "dtypes": [
            "check_half_attention",
            "check_half_dtype_edges",
            "check_half_dtype_values",
        ],
        "eight_bits": [
            "check_fp8_blocks",
            "check_fp8_tensor",
            "check_hadamard",
            "check_rotation",
            "rotate",
            "round_to_fp8",
        ],
        "faults": [
            "check_accumulation",
            "check_clock",
        ],
        "fitting": [
            "check_fit",
            "check_held_out",
            "check_predict",
            "fit_time",
            "held_out_error",
            "predict_time",
        ],
        "flash": [
            "check_backward_dv",
            "check_backward_edges",
            "check_backward_memory",
            "check_backward_values",
            "check_forward_edges",
            "check_forward_lse",
            "check_forward_memory",
            "check_forward_rows",
            "check_forward_values",
            "check_score_gradient",
        ],
        "flex": [
            "alibi",
            "causal_mask",
            "check_alibi",
            "check_causal_mask",
            "check_document_mask",
            "check_soft_cap",
            "check_tile_counts",
            "check_window_mask",
            "document_mask",
            "soft_cap",
            "tile_counts",
            "window_mask",
        ],
        "intensity": [
            "attention_cost",
            "check_cost_bytes",
            "check_cost_flops",
            "check_roof",
            "roof",
        ],
        "kernel": [
            "check_update_dtype",
            "check_update_extremes",
            "check_update_values",
        ],
        "layout": [
            "check_flash_layout",
            "check_split_heads",
            "check_split_qkv",
        ],
        "long_positions": [
            "check_interpolated",
            "check_ntk_aware",
            "check_yarn",
        ],
        "lookahead": [
            "check_leak_cause",
            "check_leaking_rows",
            "check_recall",
        ],
        "loss_scaling": [
            "check_largest_scale",
            "check_lost_share",
            "check_master_step",
            "check_next_scale",
            "check_unscale",
        ],
        "merging": [
            "check_merge_all",
            "check_merge_edges",
            "check_merge_values",
        ],
        "nan_layer": [
            "check_careful_attention",
            "check_nan_cause",
        ],
        "planning": [
            "check_kept_blocks",
            "check_kept_checkpoint",
            "check_kept_loss",
            "held_bytes",
        ],
        "policies": [
            "check_policy_devices",
            "check_policy_memory",
            "check_policy_range",
        ],
        "profiles": [
            "check_launch_gap",
            "check_stall",
            "launch_gap",
            "stall",
        ],
        "registered": [
            "check_registered_memory",
            "check_registered_models",
            "check_registered_refusals",
            "check_registered_values",
        ],
        "ring_backward": [
            "check_ring_backward",
        ],
        "rotary": [
            "check_rope_angles",
            "check_rope_conventions",
            "check_rope_positions",
            "check_rope_values",
        ],
        "softmax": [
            "check_running_extremes",
            "check_running_streams",
            "check_running_values",
        ],
        "textbook": [
            "check_largest_length",
            "check_score_bytes",
            "check_textbook_empty_rows",
            "check_textbook_mask",
            "check_textbook_values",
        ],
        "triton_kernels": [
            "check_triton_add",
            "check_triton_flash_edges",
            "check_triton_flash_skips",
            "check_triton_flash_values",
            "check_triton_softmax",
        ],
        "two_tricks": [
            "check_exp2_bits",
            "check_lazy_edges",
            "check_lazy_update",
            "check_smallest_degree",
            "exp2_by_bits",
            "lazy_update",
            "smallest_degree",
        ],
        "verdict": [
            "CheckFailed",
        ],
        "yours": [
            "compare_prediction",
            "solution_or_reference",
        ],
        "zigzag_order": [
            "check_unzigzag",
            "check_zigzag_chunks",
            "check_zigzag_positions",
        ],
    },
)
