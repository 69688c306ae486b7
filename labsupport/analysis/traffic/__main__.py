"""Count attention's traffic on this machine: `python -m labsupport.analysis.traffic`.

python -m labsupport.analysis.traffic --seqlen 128,256,512 --capacity 1024,4096
python -m labsupport.analysis.traffic --direction backward --causal
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from labsupport.analysis.traffic.count import BACKWARD, FORWARD, exponent, traffic_table


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print a table, and the exponents along what was varied."""
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.analysis.traffic", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--seqlen", type=_ints, default=[128, 256, 512])
    add("--head-dim", type=_ints, default=[16])
    add("--capacity", type=_ints, default=[2048], help="M, elements of the fast memory")
    add("--direction", choices=("forward", "backward"), default="forward")
    add("--causal", action="store_true")
    add("--csv", help="also write the table to this file")
    options = parser.parse_args(arguments)
    algorithms = FORWARD if options.direction == "forward" else BACKWARD
    try:
        table = traffic_table(
            algorithms, seqlens=options.seqlen, head_dims=options.head_dim,
            capacities=options.capacity, causal=options.causal, direction=options.direction,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    if options.csv:
        table.to_csv(options.csv, index=False)
    print("elements between a fast memory of M and the slow one, one head")
    shown = table.drop(columns=["direction", "causal"]).rename(columns={"capacity": "M"})
    print(shown.round(2).to_string(index=False))
    axes = [axis for axis in ("seqlen", "head_dim", "capacity") if table[axis].nunique() > 1]
    for name in algorithms if len(axes) == 1 else ():
        power = exponent(table[table.algorithm == name], axes[0])
        print(f"{name}: grows with {axes[0]} to the power of {power:.2f}")


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    main()
