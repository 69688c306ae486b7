"""Checks of the exercises, which name the likely mistake.

Each check takes the student's function, calls it on its own inputs and prints one `[ok]` line,
or raises `CheckFailed` with a diagnosis. `seed` draws other inputs.

An exercise has one file, named by its number: `ex_2_1_layout.py` is exercise 2-1. It holds the
reference solution, typical mistakes as edits of that solution with their diagnoses, and the checks.
A reference is reached through its file: `checks.ex_2_1_layout.split_heads`. Solution and mistakes
stand between `### BEGIN SOLUTION` and `### END SOLUTION`: where a submission is graded, these lines
are left out, and everything else still imports. `verdict` judges results and finds the mistake.
"""

from typing import Any

import lazy_loader

EXERCISES = {
    "ex_1_1_textbook_attention": [
        "check_textbook_empty_rows",
        "check_textbook_mask",
        "check_textbook_values",
    ],
    "ex_1_3_online_softmax": [
        "check_running_extremes",
        "check_running_streams",
        "check_running_values",
    ],
    "ex_1_4_tiled_forward": [
        "check_forward_edges",
        "check_forward_lse",
        "check_forward_memory",
        "check_forward_rows",
        "check_forward_values",
    ],
    "ex_1_5_backward": [
        "check_backward_dv",
        "check_backward_edges",
        "check_backward_memory",
        "check_backward_values",
        "check_score_gradient",
    ],
    "ex_1_6_half_precision": [
        "check_half_attention",
        "check_half_dtype_edges",
        "check_half_dtype_values",
    ],
    "ex_1_7_fp8": [
        "check_fp8_blocks",
        "check_fp8_tensor",
        "check_hadamard",
        "check_rotation",
    ],
    "ex_1_8_lookahead": [
        "check_leak_cause",
        "check_leaking_rows",
        "check_recall",
    ],
    "ex_2_1_layout": [
        "check_flash_layout",
        "check_split_heads",
        "check_split_qkv",
    ],
    "ex_2_2_own_attention": [
        "check_registered_memory",
        "check_registered_models",
        "check_registered_refusals",
        "check_registered_values",
    ],
    "ex_2_3_decoding_mask": [
        "check_visible_decoding",
        "check_visible_padding",
        "check_visible_positions",
    ],
    "ex_2_5_policy": [
        "check_policy_devices",
        "check_policy_memory",
        "check_policy_range",
    ],
    "ex_2_6_cache": [
        "check_cache_growth",
        "check_cache_values",
        "check_gather_pages",
        "check_quantise_keys",
        "check_split_decode",
    ],
    "ex_2_7_flex": [
        "check_alibi",
        "check_causal_mask",
        "check_document_mask",
        "check_soft_cap",
        "check_tile_counts",
        "check_window_mask",
    ],
    "ex_2_8_nan_layer": [
        "check_careful_attention",
        "check_nan_cause",
    ],
    "ex_2_9_loss_scaling": [
        "check_largest_scale",
        "check_lost_share",
        "check_master_step",
        "check_next_scale",
        "check_unscale",
    ],
    "ex_3_1_rotary": [
        "check_rope_angles",
        "check_rope_conventions",
        "check_rope_positions",
        "check_rope_values",
    ],
    "ex_3_2_chunked_loss": [
        "check_loss_gradients",
        "check_loss_memory",
        "check_loss_values",
    ],
    "ex_3_4_merge": [
        "check_merge_all",
        "check_merge_edges",
        "check_merge_values",
    ],
    "ex_3_5_zigzag": [
        "check_unzigzag",
        "check_zigzag_chunks",
        "check_zigzag_positions",
    ],
    "ex_3_6_data_parallel": [
        "check_average_each",
        "check_average_in_buckets",
        "check_buckets",
        "check_overlap",
        "check_sharded_layer",
        "check_sharded_memory",
    ],
    "ex_3_7_ring_backward": [
        "check_ring_backward",
    ],
    "ex_3_8_accumulation": [
        "check_accumulation",
    ],
    "ex_3_9_long_positions": [
        "check_interpolated",
        "check_ntk_aware",
        "check_yarn",
    ],
    "ex_4_1_cost": [
        "check_cost_bytes",
        "check_cost_flops",
        "check_roof",
    ],
    "ex_4_2_traffic": [
        "check_textbook_traffic",
        "check_tiled_causal",
        "check_tiled_traffic",
    ],
    "ex_4_3_triton_kernels": [
        "check_triton_flash_edges",
        "check_triton_flash_skips",
        "check_triton_flash_values",
        "check_update_dtype",
        "check_update_extremes",
        "check_update_values",
    ],
    "ex_4_4_predict": [
        "check_fit",
        "check_held_out",
    ],
    "ex_4_5_choose": [
        "check_choice_limits",
        "check_choice_sources",
        "check_choice_ties",
    ],
    "ex_4_6_clock": [
        "check_clock",
    ],
    "ex_4_7_two_tricks": [
        "check_exp2_bits",
        "check_lazy_edges",
        "check_lazy_update",
        "check_smallest_degree",
    ],
    "ex_4_8_profile": [
        "check_launch_gap",
        "check_stall",
    ],
}
OTHERS = {
    "errors": ["CheckFailed"],
    "yours": ["compare_prediction", "solution_or_reference"],
}

__getattr__: Any
__getattr__, __dir__, _ = lazy_loader.attach(__name__, EXERCISES, EXERCISES | OTHERS)
__all__ = [name for names in (EXERCISES | OTHERS).values() for name in names]
