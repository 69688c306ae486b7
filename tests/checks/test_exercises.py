"""Each check passes the notebook's solution, and names each mistake of its table, and others."""

import pytest

from labsupport import checks
from tests.checks.solutions import diagnosis, each, function, solution_source

TEXTBOOK = (
    checks.check_textbook_values,
    checks.check_textbook_mask,
    checks.check_textbook_empty_rows,
)
RUNNING = (checks.check_running_values, checks.check_running_extremes)
FORWARD = (
    checks.check_forward_rows,
    checks.check_forward_lse,
    checks.check_forward_values,
    checks.check_forward_edges,
)
BACKWARD = (checks.check_backward_dv, checks.check_backward_values, checks.check_backward_edges)
DTYPES = (checks.check_half_dtype_values, checks.check_half_dtype_edges)
FP8 = (checks.check_fp8_tensor, checks.check_fp8_blocks)
VISIBLE = (checks.check_visible_positions, checks.check_visible_padding)
MERGE = (checks.check_merge_values, checks.check_merge_edges)
CACHE = (checks.check_cache_values, checks.check_cache_growth)
POLICY = (checks.check_policy_devices, checks.check_policy_range, checks.check_policy_memory)
OWN = (checks.check_registered_values, checks.check_registered_models)
COST = (checks.check_cost_flops, checks.check_cost_bytes)
BUCKETS = (checks.check_average_in_buckets, checks.check_overlap)
SHARDED = (checks.check_sharded_layer, checks.check_sharded_memory)
TILED = (checks.check_tiled_traffic, checks.check_tiled_causal)
UPDATE = (checks.check_lazy_update, checks.check_lazy_edges)
CHOICE = (checks.check_choice_limits, checks.check_choice_ties, checks.check_choice_sources)

# grade_id, the solution's functions, and the checks of each that draw inputs
SOLVED = {
    "ex-1-1-textbook-attention": {"textbook_attention": TEXTBOOK},
    "ex-1-3-online-softmax": {"running_max_and_sum": RUNNING},
    "ex-1-4-tiled-forward": {"my_flash_forward": FORWARD},
    "ex-1-5-backward": {"my_flash_backward": BACKWARD},
    "ex-1-5-backward-scores": {"score_gradient": (checks.check_score_gradient,)},
    "ex-1-6-half-precision": {
        "half_dtype": DTYPES,
        "half_attention": (checks.check_half_attention,),
    },
    "ex-1-7-fp8": {"round_to_fp8": FP8},
    "ex-1-7-fp8-rotation": {
        "hadamard": (checks.check_hadamard,),
        "rotate": (checks.check_rotation,),
    },
    "ex-1-8-fault": {
        "rows_that_leak": (checks.check_leaking_rows,),
        "repaired": (checks.check_recall,),
    },
    "ex-1-8-cause": {"cause": ()},
    "ex-2-1-layout": {
        "split_heads": (checks.check_split_heads,),
        "to_flash_layout": (checks.check_flash_layout,),
        "split_qkv": (checks.check_split_qkv,),
    },
    "ex-2-2-own-attention": {"lab_attention": (*OWN, checks.check_registered_refusals)},
    "ex-2-3-decoding-mask": {"visible": (*VISIBLE, checks.check_visible_decoding)},
    "ex-2-5-policy": {"my_policy": POLICY},
    "ex-2-6-cache": {"KVCache": CACHE},
    "ex-2-6-split": {"split_decode": (checks.check_split_decode,)},
    "ex-2-6-store": {
        "gather_pages": (checks.check_gather_pages,),
        "quantise_keys": (checks.check_quantise_keys,),
    },
    "ex-2-7-masks": {
        "causal_mask": (checks.check_causal_mask,),
        "window_mask": (checks.check_window_mask,),
        "document_mask": (checks.check_document_mask,),
    },
    "ex-2-7-scores": {"soft_cap": (checks.check_soft_cap,), "alibi": (checks.check_alibi,)},
    "ex-2-7-tiles": {"tile_counts": (checks.check_tile_counts,)},
    "ex-2-8-fault": {"repaired": (checks.check_careful_attention,)},
    "ex-2-8-cause": {"cause": ()},
    "ex-2-9-range": {
        "lost_share": (checks.check_lost_share,),
        "largest_scale": (checks.check_largest_scale,),
    },
    "ex-2-9-scaler": {
        "unscale": (checks.check_unscale,),
        "next_scale": (checks.check_next_scale,),
    },
    "ex-2-9-masters": {"master_step": (checks.check_master_step,)},
    "ex-3-1-rotary": {
        "rotary_angles": (checks.check_rope_angles,),
        "apply_rope": (checks.check_rope_values,),
        "pairs_to_halves": (checks.check_rope_conventions,),
    },
    "ex-3-2-chunked-loss": {"ChunkedLoss": (checks.check_loss_values, checks.check_loss_gradients)},
    "ex-3-4-merge": {"merge": MERGE, "merge_all": (checks.check_merge_all,)},
    "ex-3-5-zigzag": {
        "zigzag_chunks": (checks.check_zigzag_chunks,),
        "zigzag_positions": (checks.check_zigzag_positions,),
        "unzigzag": (checks.check_unzigzag,),
    },
    "ex-3-6-hooks": {"average_each": (checks.check_average_each,)},
    "ex-3-6-buckets": {"make_buckets": (checks.check_buckets,)},
    "ex-3-6-overlap": {"average_in_buckets": BUCKETS},
    "ex-3-6-shard": {"ShardedLinear": SHARDED},
    "ex-3-7-ring-backward": {"ring_backward": (checks.check_ring_backward,)},
    "ex-3-8-fault": {"after_repair": (checks.check_accumulation,)},
    "ex-3-9-frequencies": {
        "interpolated": (checks.check_interpolated,),
        "ntk_aware": (checks.check_ntk_aware,),
        "yarn": (checks.check_yarn,),
    },
    "ex-4-1-cost": {"attention_cost": COST, "roof": (checks.check_roof,)},
    "ex-4-2-traffic": {
        "textbook_traffic": (checks.check_textbook_traffic,),
        "tiled_traffic": TILED,
    },
    "ex-4-4-predict": {
        "fit_time": (checks.check_fit,),
        "held_out_error": (checks.check_held_out,),
    },
    "ex-4-5-choose": {"choose": CHOICE},
    "ex-4-6-fault": {"after_repair": (checks.check_clock,)},
    "ex-4-7-exp2": {
        "exp2_by_bits": (checks.check_exp2_bits,),
        "smallest_degree": (checks.check_smallest_degree,),
    },
    "ex-4-7-lazy": {"lazy_update": UPDATE},
    "ex-4-8-profile": {
        "launch_gap": (checks.check_launch_gap,),
        "stall": (checks.check_stall,),
    },
}
FUNCTIONS = [(cell, name, some) for cell, names in SOLVED.items() for name, some in names.items()]
WITHOUT_SEED = {
    "ex-1-3-online-softmax": (checks.check_running_streams,),
    "ex-1-4-tiled-forward": (checks.check_forward_memory,),
    "ex-1-5-backward": (checks.check_backward_memory,),
    "ex-1-8-cause": (checks.check_leak_cause,),
    "ex-2-2-own-attention": (checks.check_registered_memory,),
    "ex-2-8-cause": (checks.check_nan_cause,),
    "ex-3-2-chunked-loss": (checks.check_loss_memory,),
}


@pytest.mark.parametrize(
    ("cell", "name", "some"), FUNCTIONS, ids=[name for _, name, _ in FUNCTIONS]
)
def test_the_notebooks_solution_passes_with_another_seed(cell, name, some, capfd):
    """The notebooks themselves run the checks with the first one."""
    student = function(solution_source(cell), name)
    for check in some:
        check(student, seed=5)
    for check in WITHOUT_SEED.get(cell, ()):
        check(student)
    printed, warned = capfd.readouterr()
    assert printed.count("[ok]") == len(some) + len(WITHOUT_SEED.get(cell, ()))
    assert printed.count("(other inputs)") == len(some)
    assert warned == ""


@pytest.mark.parametrize(("name", "some"), [(name, some) for _, name, some in FUNCTIONS])
def test_a_stub_is_called_one(name, some):
    kind = f"class {name}(torch.autograd.Function):\n    @staticmethod\n    def forward"
    head = kind if name in ("ChunkedLoss", "ShardedLinear") else f"def {name}"
    stub = function(f"{head}(*args, **options): raise NotImplementedError", name)
    for check in some:
        assert f"{name} is not written yet" in diagnosis(check, stub)


def choose_by_rows(choice):
    return lambda table, **limits: choice(table.to_dict("records"), *limits.values())


def limits(choice):
    checks.check_choice_limits(choose_by_rows(choice))


def ties(choice):
    checks.check_choice_ties(choose_by_rows(choice))


def sources(choice):
    checks.check_choice_sources(choose_by_rows(choice))


def far_away(angles):
    checks.check_rope_positions(angles, checks.ex_3_1_rotary.apply_rope)


def accumulated(gradient):
    checks.check_accumulation(lambda *batch: ("c", gradient(*batch)))


def clock(median):
    checks.check_clock(
        lambda *case: ("d", median(checks.ex_4_6_clock.VirtualGpu(*case[:3]), case[3]))
    )


# An exercise's file, a reference in it, and a table of its mistakes; the checks that name them
TABLES = {
    ("ex_1_1_textbook_attention", "textbook_attention", "MISTAKES"): TEXTBOOK,
    ("ex_1_3_online_softmax", "running_max_and_sum", "MISTAKES"): RUNNING,
    ("ex_1_4_tiled_forward", "flash_forward", "MISTAKES"): FORWARD,
    ("ex_1_5_backward", "flash_backward", "MISTAKES"): BACKWARD,
    ("ex_1_5_backward", "score_gradient", "SCORE_MISTAKES"): checks.check_score_gradient,
    ("ex_1_6_half_precision", "half_dtype", "DTYPE_MISTAKES"): DTYPES,
    ("ex_1_7_fp8", "round_to_fp8", "FP8_MISTAKES"): FP8,
    ("ex_1_7_fp8", "hadamard", "HADAMARD_MISTAKES"): checks.check_hadamard,
    ("ex_1_7_fp8", "rotate", "ROTATE_MISTAKES"): checks.check_rotation,
    ("ex_1_8_lookahead", "rows_that_leak", "ROW_MISTAKES"): checks.check_leaking_rows,
    ("ex_1_8_lookahead", "leak_cause", "CAUSE_MISTAKES"): checks.check_leak_cause,
    ("ex_1_8_lookahead", "recall", "RECALL_MISTAKES"): checks.check_recall,
    ("ex_2_1_layout", "split_heads", "HEAD_MISTAKES"): checks.check_split_heads,
    ("ex_2_1_layout", "to_flash_layout", "FLASH_MISTAKES"): checks.check_flash_layout,
    ("ex_2_1_layout", "split_qkv", "QKV_MISTAKES"): checks.check_split_qkv,
    ("ex_2_2_own_attention", "lab_attention", "MISTAKES"): checks.check_registered_values,
    ("ex_2_3_decoding_mask", "visible", "MISTAKES"): VISIBLE,
    ("ex_2_6_cache", "KVCache", "CACHE_MISTAKES"): CACHE,
    ("ex_2_6_cache", "split_decode", "SPLIT_MISTAKES"): checks.check_split_decode,
    ("ex_2_6_cache", "gather_pages", "PAGE_MISTAKES"): checks.check_gather_pages,
    ("ex_2_6_cache", "quantise_keys", "QUANTISE_MISTAKES"): checks.check_quantise_keys,
    ("ex_2_7_flex", "causal_mask", "CAUSAL_MISTAKES"): checks.check_causal_mask,
    ("ex_2_7_flex", "window_mask", "WINDOW_MISTAKES"): checks.check_window_mask,
    ("ex_2_7_flex", "document_mask", "DOCUMENT_MISTAKES"): checks.check_document_mask,
    ("ex_2_7_flex", "soft_cap", "CAP_MISTAKES"): checks.check_soft_cap,
    ("ex_2_7_flex", "alibi", "ALIBI_MISTAKES"): checks.check_alibi,
    ("ex_2_7_flex", "tile_counts", "TILE_MISTAKES"): checks.check_tile_counts,
    ("ex_2_8_nan_layer", "nan_cause", "CAUSE_MISTAKES"): checks.check_nan_cause,
    ("ex_2_8_nan_layer", "careful_attention", "CAREFUL_MISTAKES"): checks.check_careful_attention,
    ("ex_2_9_loss_scaling", "lost_share", "SHARE_MISTAKES"): checks.check_lost_share,
    ("ex_2_9_loss_scaling", "largest_scale", "SCALE_MISTAKES"): checks.check_largest_scale,
    ("ex_2_9_loss_scaling", "unscale", "UNSCALE_MISTAKES"): checks.check_unscale,
    ("ex_2_9_loss_scaling", "unscale", "FINITE_MISTAKES"): checks.check_unscale,
    ("ex_2_9_loss_scaling", "next_scale", "NEXT_MISTAKES"): checks.check_next_scale,
    ("ex_2_9_loss_scaling", "master_step", "MASTER_MISTAKES"): checks.check_master_step,
    ("ex_3_1_rotary", "rotary_angles", "ANGLE_MISTAKES"): (checks.check_rope_angles, far_away),
    ("ex_3_1_rotary", "apply_rope", "TURN_MISTAKES"): checks.check_rope_values,
    ("ex_3_1_rotary", "pairs_to_halves", "ROW_MISTAKES"): checks.check_rope_conventions,
    ("ex_3_2_chunked_loss", "ChunkedLoss", "LOSS_MISTAKES"): checks.check_loss_values,
    ("ex_3_2_chunked_loss", "ChunkedLoss", "GRADIENT_MISTAKES"): checks.check_loss_gradients,
    ("ex_3_4_merge", "merge", "MERGE_MISTAKES"): MERGE,
    ("ex_3_4_merge", "merge_all", "ALL_MISTAKES"): checks.check_merge_all,
    ("ex_3_5_zigzag", "zigzag_chunks", "CHUNK_MISTAKES"): checks.check_zigzag_chunks,
    ("ex_3_5_zigzag", "zigzag_positions", "POSITION_MISTAKES"): checks.check_zigzag_positions,
    ("ex_3_5_zigzag", "unzigzag", "INVERSE_MISTAKES"): checks.check_unzigzag,
    ("ex_3_6_data_parallel", "average_each", "HOOK_MISTAKES"): checks.check_average_each,
    ("ex_3_6_data_parallel", "make_buckets", "BUCKET_MISTAKES"): checks.check_buckets,
    ("ex_3_6_data_parallel", "average_in_buckets", "OVERLAP_MISTAKES"): BUCKETS[0],
    ("ex_3_6_data_parallel", "ShardedLinear", "SHARD_MISTAKES"): SHARDED[0],
    ("ex_3_7_ring_backward", "ring_backward", "MISTAKES"): checks.check_ring_backward,
    ("ex_3_8_accumulation", "accumulated_gradient", "ACCUMULATION_MISTAKES"): accumulated,
    ("ex_4_6_clock", "median_ms", "CLOCK_MISTAKES"): clock,
    ("ex_3_9_long_positions", "interpolated", "INTERPOLATED_MISTAKES"): checks.check_interpolated,
    ("ex_3_9_long_positions", "ntk_aware", "NTK_MISTAKES"): checks.check_ntk_aware,
    ("ex_3_9_long_positions", "yarn", "RAMP_MISTAKES"): checks.check_yarn,
    ("ex_3_9_long_positions", "yarn", "FACTOR_MISTAKES"): checks.check_yarn,
    ("ex_4_1_cost", "attention_cost", "FLOP_MISTAKES"): checks.check_cost_flops,
    ("ex_4_1_cost", "attention_cost", "BYTE_MISTAKES"): checks.check_cost_bytes,
    ("ex_4_1_cost", "roof", "ROOF_MISTAKES"): checks.check_roof,
    ("ex_4_2_traffic", "textbook_traffic", "TEXTBOOK_MISTAKES"): checks.check_textbook_traffic,
    ("ex_4_2_traffic", "tiled_traffic", "TILED_MISTAKES"): checks.check_tiled_traffic,
    ("ex_4_2_traffic", "tiled_traffic", "CAUSAL_MISTAKES"): checks.check_tiled_causal,
    ("ex_4_4_predict", "fit_time", "FIT_MISTAKES"): checks.check_fit,
    ("ex_4_4_predict", "held_out_error", "TEST_MISTAKES"): checks.check_held_out,
    ("ex_4_5_choose", "choice", "LIMIT_MISTAKES"): limits,
    ("ex_4_5_choose", "choice", "TIE_MISTAKES"): ties,
    ("ex_4_5_choose", "choice", "SOURCE_MISTAKES"): sources,
    ("ex_4_7_two_tricks", "exp2_by_bits", "BIT_MISTAKES"): checks.check_exp2_bits,
    ("ex_4_7_two_tricks", "smallest_degree", "DEGREE_MISTAKES"): checks.check_smallest_degree,
    ("ex_4_7_two_tricks", "lazy_update", "UPDATE_MISTAKES"): UPDATE,
    ("ex_4_8_profile", "launch_gap", "GAP_MISTAKES"): checks.check_launch_gap,
    ("ex_4_8_profile", "stall", "STALL_MISTAKES"): checks.check_stall,
}
# In a model, a wrong layout is named by its values.
IN_MODELS = checks.ex_2_2_own_attention


@each(
    *(
        (check, getattr(getattr(checks, file), solution), getattr(getattr(checks, file), table))
        for (file, solution, table), check in TABLES.items()
    ),
    (checks.check_registered_models, IN_MODELS.lab_attention, IN_MODELS.MISTAKES[2:]),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)


def test_no_table_of_mistakes_is_forgotten():
    named = {(file, table) for file, _, table in TABLES}
    named.add(("ex_1_6_half_precision", "ATTENTION_MISTAKES"))  # in test_refused.py
    for file in checks.EXERCISES.keys() - {"ex_4_3_triton_kernels"}:  # in test_triton_kernels.py
        for name in vars(getattr(checks, file)):
            assert not name.endswith("MISTAKES") or (file, name) in named
