"""Each check passes the notebook's solution, and names each mistake of its table, and others."""

import pytest

from labsupport import checks
from labsupport.checks import ex_1_1_textbook_attention as textbook
from labsupport.checks import ex_1_2_score_memory as score_memory
from labsupport.checks import ex_1_3_online_softmax as softmax
from labsupport.checks import ex_1_4_tiled_forward as tiled_forward
from labsupport.checks import ex_1_5_backward as backward
from labsupport.checks import ex_1_6_half_precision as dtypes
from labsupport.checks import ex_1_7_fp8 as eight_bits
from labsupport.checks import ex_1_8_lookahead as lookahead
from labsupport.checks import ex_2_1_layout as layout
from labsupport.checks import ex_2_2_own_attention as registered
from labsupport.checks import ex_2_3_decoding_mask as decoding
from labsupport.checks import ex_2_4_amdahl as amdahl
from labsupport.checks import ex_2_6_cache as caching
from labsupport.checks import ex_2_7_flex as flex
from labsupport.checks import ex_2_8_nan_layer as nan_layer
from labsupport.checks import ex_2_9_loss_scaling as loss_scaling
from labsupport.checks import ex_3_1_rotary as rotary
from labsupport.checks import ex_3_2_chunked_loss as chunked_loss
from labsupport.checks import ex_3_3_kept_bytes as planning
from labsupport.checks import ex_3_4_merge as merging
from labsupport.checks import ex_3_5_zigzag as zigzag_order
from labsupport.checks import ex_3_6_data_parallel as data_parallel
from labsupport.checks import ex_3_7_ring_backward as ring_backward
from labsupport.checks import ex_3_8_accumulation as accumulation
from labsupport.checks import ex_3_9_long_positions as long_positions
from labsupport.checks import ex_4_1_cost as intensity
from labsupport.checks import ex_4_2_traffic as counting
from labsupport.checks import ex_4_4_predict as fitting
from labsupport.checks import ex_4_5_choose as choosing
from labsupport.checks import ex_4_6_clock as clock_file
from labsupport.checks import ex_4_7_two_tricks as two_tricks
from labsupport.checks import ex_4_8_profile as profiles
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
BYTES = (checks.check_kept_blocks, checks.check_kept_checkpoint, checks.check_kept_loss)
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
    "ex-1-2-score-memory": {
        "score_bytes": (checks.check_score_bytes,),
        "longest_that_fits": (checks.check_largest_length,),
    },
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
    "ex-2-4-amdahl": {
        "amdahl": (checks.check_amdahl,),
        "attention_flop_share": (checks.check_attention_share,),
    },
    "ex-2-5-policy": {"my_policy": POLICY},
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
    "ex-3-3-kept-bytes": {"kept_bytes": BYTES},
    "ex-3-4-merge": {"merge": MERGE, "merge_all": (checks.check_merge_all,)},
    "ex-3-5-zigzag": {
        "zigzag_chunks": (checks.check_zigzag_chunks,),
        "zigzag_positions": (checks.check_zigzag_positions,),
        "unzigzag": (checks.check_unzigzag,),
    },
    "ex-3-6-hooks": {"rehearse_each": (checks.check_average_each,)},
    "ex-3-6-buckets": {"make_buckets": (checks.check_buckets,)},
    "ex-3-6-overlap": {"rehearse_buckets": BUCKETS},
    "ex-3-6-shard": {"rehearse_layer": SHARDED},
    "ex-3-7-ring-backward": {"rehearse_ring": (checks.check_ring_backward,)},
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
        "predict_time": (checks.check_predict,),
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
    student = function(solution_source(f"0{cell[3]}", cell), name)
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
    kind = "class ChunkedLoss(torch.autograd.Function):\n    @staticmethod\n    def forward"
    head = kind if name == "ChunkedLoss" else f"def {name}"
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
    checks.check_rope_positions(angles, rotary.apply_rope)


def each_averaged(attach):
    checks.check_average_each(data_parallel.rehearsed_hooks(attach))


def buckets_averaged(attach):
    checks.check_average_in_buckets(data_parallel.rehearsed_buckets(attach))


def sharded(layer):
    checks.check_sharded_layer(data_parallel.rehearsed_layer(layer))


def ring(backward):
    checks.check_ring_backward(ring_backward.rehearsed_ring(backward))


def accumulated(gradient):
    checks.check_accumulation(lambda *batch: ("c", gradient(*batch)))


def clock(median):
    checks.check_clock(lambda *case: ("d", median(clock_file.VirtualGpu(*case[:3]), case[3])))


@each(
    (TEXTBOOK, textbook.textbook_attention, textbook.MISTAKES),
    (checks.check_score_bytes, score_memory.score_bytes, score_memory.BYTE_MISTAKES),
    (checks.check_largest_length, score_memory.longest_that_fits, score_memory.LENGTH_MISTAKES),
    (RUNNING, softmax.running_max_and_sum, softmax.MISTAKES),
    (FORWARD, tiled_forward.flash_forward, tiled_forward.MISTAKES),
    (BACKWARD, backward.flash_backward, backward.MISTAKES),
    (checks.check_score_gradient, backward.score_gradient, backward.SCORE_MISTAKES),
    (DTYPES, dtypes.half_dtype, dtypes.DTYPE_MISTAKES),
    (FP8, eight_bits.round_to_fp8, eight_bits.FP8_MISTAKES),
    (checks.check_hadamard, eight_bits.hadamard, eight_bits.HADAMARD_MISTAKES),
    (checks.check_rotation, eight_bits.rotate, eight_bits.ROTATE_MISTAKES),
    (checks.check_leaking_rows, lookahead.rows_that_leak, lookahead.ROW_MISTAKES),
    (checks.check_leak_cause, lookahead.leak_cause, lookahead.CAUSE_MISTAKES),
    (checks.check_recall, lookahead.recall, lookahead.RECALL_MISTAKES),
    (checks.check_split_heads, layout.split_heads, layout.HEAD_MISTAKES),
    (checks.check_flash_layout, layout.to_flash_layout, layout.FLASH_MISTAKES),
    (checks.check_split_qkv, layout.split_qkv, layout.QKV_MISTAKES),
    (checks.check_registered_values, registered.lab_attention, registered.MISTAKES),
    (checks.check_registered_models, registered.lab_attention, registered.MISTAKES[2:]),
    (VISIBLE, decoding.visible, decoding.MISTAKES),
    (checks.check_amdahl, amdahl.overall_speedup, amdahl.SPEEDUP_MISTAKES),
    (checks.check_attention_share, amdahl.flop_share, amdahl.SHARE_MISTAKES),
    (CACHE, caching.replay, caching.REPLAY_MISTAKES),
    (checks.check_split_decode, caching.split_decode, caching.SPLIT_MISTAKES),
    (checks.check_gather_pages, caching.gather_pages, caching.PAGE_MISTAKES),
    (checks.check_quantise_keys, caching.quantise_keys, caching.QUANTISE_MISTAKES),
    (checks.check_causal_mask, flex.causal_mask, flex.CAUSAL_MISTAKES),
    (checks.check_window_mask, flex.window_mask, flex.WINDOW_MISTAKES),
    (checks.check_document_mask, flex.document_mask, flex.DOCUMENT_MISTAKES),
    (checks.check_soft_cap, flex.soft_cap, flex.CAP_MISTAKES),
    (checks.check_alibi, flex.alibi, flex.ALIBI_MISTAKES),
    (checks.check_tile_counts, flex.tile_counts, flex.TILE_MISTAKES),
    (checks.check_nan_cause, nan_layer.nan_cause, nan_layer.CAUSE_MISTAKES),
    (checks.check_careful_attention, nan_layer.careful_attention, nan_layer.CAREFUL_MISTAKES),
    (checks.check_lost_share, loss_scaling.lost_share, loss_scaling.SHARE_MISTAKES),
    (checks.check_largest_scale, loss_scaling.largest_scale, loss_scaling.SCALE_MISTAKES),
    (checks.check_unscale, loss_scaling.unscale, loss_scaling.UNSCALE_MISTAKES),
    (checks.check_unscale, loss_scaling.unscale, loss_scaling.FINITE_MISTAKES),
    (checks.check_next_scale, loss_scaling.next_scale, loss_scaling.NEXT_MISTAKES),
    (checks.check_master_step, loss_scaling.master_step, loss_scaling.MASTER_MISTAKES),
    ((checks.check_rope_angles, far_away), rotary.rotary_angles, rotary.ANGLE_MISTAKES),
    (checks.check_rope_values, rotary.apply_rope, rotary.TURN_MISTAKES),
    (checks.check_rope_conventions, rotary.pairs_to_halves, rotary.ROW_MISTAKES),
    (checks.check_loss_values, chunked_loss.ChunkedLoss, chunked_loss.LOSS_MISTAKES),
    (checks.check_loss_gradients, chunked_loss.ChunkedLoss, chunked_loss.GRADIENT_MISTAKES),
    (BYTES, planning.held_bytes, planning.MISTAKES),
    (MERGE, merging.merge, merging.MERGE_MISTAKES),
    (checks.check_merge_all, merging.merge_all, merging.ALL_MISTAKES),
    (checks.check_zigzag_chunks, zigzag_order.zigzag_chunks, zigzag_order.CHUNK_MISTAKES),
    (checks.check_zigzag_positions, zigzag_order.zigzag_positions, zigzag_order.POSITION_MISTAKES),
    (checks.check_unzigzag, zigzag_order.unzigzag, zigzag_order.INVERSE_MISTAKES),
    (each_averaged, data_parallel.average_each, data_parallel.HOOK_MISTAKES),
    (checks.check_buckets, data_parallel.make_buckets, data_parallel.BUCKET_MISTAKES),
    (buckets_averaged, data_parallel.average_in_buckets, data_parallel.OVERLAP_MISTAKES),
    (sharded, data_parallel.ShardedLinear, data_parallel.SHARD_MISTAKES),
    (ring, ring_backward.ring_backward, ring_backward.MISTAKES),
    (accumulated, accumulation.accumulated_gradient, accumulation.ACCUMULATION_MISTAKES),
    (clock, clock_file.median_ms, clock_file.CLOCK_MISTAKES),
    (
        checks.check_interpolated,
        long_positions.interpolated,
        long_positions.INTERPOLATED_MISTAKES,
    ),
    (checks.check_ntk_aware, long_positions.ntk_aware, long_positions.NTK_MISTAKES),
    (checks.check_yarn, long_positions.yarn, long_positions.RAMP_MISTAKES),
    (checks.check_yarn, long_positions.yarn, long_positions.FACTOR_MISTAKES),
    (checks.check_cost_flops, intensity.attention_cost, intensity.FLOP_MISTAKES),
    (checks.check_cost_bytes, intensity.attention_cost, intensity.BYTE_MISTAKES),
    (checks.check_roof, intensity.roof, intensity.ROOF_MISTAKES),
    (checks.check_textbook_traffic, counting.textbook_traffic, counting.TEXTBOOK_MISTAKES),
    (checks.check_tiled_traffic, counting.tiled_traffic, counting.TILED_MISTAKES),
    (checks.check_tiled_causal, counting.tiled_traffic, counting.CAUSAL_MISTAKES),
    (checks.check_fit, fitting.fit_time, fitting.FIT_MISTAKES),
    (checks.check_predict, fitting.predict_time, fitting.PREDICT_MISTAKES),
    (checks.check_held_out, fitting.held_out_error, fitting.TEST_MISTAKES),
    (limits, choosing.choice, choosing.LIMIT_MISTAKES),
    (ties, choosing.choice, choosing.TIE_MISTAKES),
    (sources, choosing.choice, choosing.SOURCE_MISTAKES),
    (checks.check_exp2_bits, two_tricks.exp2_by_bits, two_tricks.BIT_MISTAKES),
    (checks.check_smallest_degree, two_tricks.smallest_degree, two_tricks.DEGREE_MISTAKES),
    (UPDATE, two_tricks.lazy_update, two_tricks.UPDATE_MISTAKES),
    (checks.check_launch_gap, profiles.launch_gap, profiles.GAP_MISTAKES),
    (checks.check_stall, profiles.stall, profiles.STALL_MISTAKES),
)
def test_each_mistake_gets_its_own_diagnosis(check, student, said):
    assert said in diagnosis(check, student)
