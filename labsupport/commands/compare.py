"""The command `labsupport compare`: PyTorch is imported when it runs, not with this file."""

from dataclasses import asdict, replace

from labsupport.commands import grid_options as options


def compare_command(
    batch: options.Batch = None,
    seqlen: options.Seqlen = None,
    nheads: options.Nheads = None,
    headdim: options.Headdim = None,
    causal: options.Causal = None,
    dtype: options.Dtype = None,
    no_grad: options.NoGrad = False,
    kv_heads: options.KvHeads = None,
    preset: options.Preset = None,
    repeats: options.Repeats = None,
    max_seconds: options.MaxSeconds = 1.0,
    device: options.Device = None,
    to_json: options.Json = None,
    to_csv: options.Csv = None,
) -> None:
    """Compare all implementations that run here: the fastest, the leanest, and what to do next.

    of ceiling: share of the speed that matrix products and copies reach on this device, measured
    just now. good: half of it or more; fair: a quarter.

    \b
    labsupport compare --seqlen 2048 --causal --no-grad
    labsupport compare --preset long-8k --no-grad --csv table.csv
    """
    import torch

    from labsupport.profiling.bench import (
        compare_report,
        judge_table,
        measurable_backends,
        one_case,
    )
    from labsupport.profiling.benchmark import run_grid
    from labsupport.profiling.hardware import measured_ceilings
    from labsupport.profiling.timing import resolve_device

    where = resolve_device(device)
    shape = {"batch": batch, "seqlen": seqlen, "heads": nheads, "head_dim": headdim}
    shape |= {"causal": causal, "kv_heads": kv_heads}
    case = one_case(
        where, backend="standard", preset=preset, dtype=dtype, grad=not no_grad, **shape
    )
    ceilings = measured_ceilings(str(where))
    cases = [replace(case, backend=name) for name in measurable_backends(where)]
    table = run_grid(cases, device=where, max_seconds=max_seconds, repeats=repeats)
    sms = None
    if where.type == "cuda":
        sms = torch.cuda.get_device_properties(where).multi_processor_count
    table = judge_table(table, case, ceilings, sms)
    text = compare_report(table, case, ceilings)
    options.show_table(text, table, to_json, to_csv, ceilings=asdict(ceilings))
