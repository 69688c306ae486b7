"""Calibrate on some shapes of a recorded run, predict the others, and print how far off that was.

python -m labsupport.analysis.predictor --run attention-h200
python -m labsupport.analysis.predictor --run calibration-cpu --weights
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from labsupport.analysis.predictor import calibrate_run
from labsupport.analysis.predictor.evaluate import (
    WITHIN,
    choices,
    errors_by_backend,
    good_choices,
    with_predictions,
)
from labsupport.analysis.predictor.split import SPLITS


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors by backend, and the choices that were not the best."""
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.analysis.predictor", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--run", choices=list(SPLITS), default="attention-h200")
    add("--weights", action="store_true", help="print the fitted weights as well")
    add("--cases", action="store_true", help="print every held-out case as well")
    options = parser.parse_args(arguments)
    model, held_out = calibrate_run(options.run)
    seen = sum(fit.cases for fit in model.fits.values())
    print(f"{options.run}, {model.device.name}: {seen} cases calibrate, {len(held_out)} are tested")
    if options.weights:
        for key, fit in model.fits.items():
            weights = (f"{name} {weight:.3g}" for name, weight in fit.weights.items() if weight)
            print(f"  {' '.join(key)}: {', '.join(weights)}")
        print(f"  spread {model.spread:.3f}")
    table = with_predictions(held_out, model)
    for reason, rows in Counter(table.attrs["refused"].values()).items():
        print(f"{rows} refused: {reason}")
    if options.cases:
        shown = ["backend", "direction", "seqlen", "batch", "heads", "kv_heads", "head_dim"]
        shown += ["dtype", "causal", "ms", "predicted_ms", "error", "memory_error"]
        print(table[shown].to_string(index=False, float_format="%.3g"))
    print("Errors on the held-out shapes in percent; covered: measured within the 90% interval")
    print(errors_by_backend(table).to_string(index=False, float_format="%.1f", na_rep=""))
    chosen = choices(table)
    print(f"Chosen within {WITHIN - 1:.0%} of the best: {good_choices(table):.1%} of {len(chosen)}")
    missed = chosen[chosen.times_best > WITHIN]
    if len(missed):
        print(missed.to_string(index=False, float_format="%.2f"))


if __name__ == "__main__":
    main()
