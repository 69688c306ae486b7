"""Measure every rule of the best-practice table on this machine."""

from labsupport.precision.experiments import best_practice_table


def main() -> None:
    """Measure and print the table."""
    for row in best_practice_table().to_dict("records"):
        print(f"{row['component']}: {row['recommended']}")
        for name in ("must match", "why", "measured", "experiment"):
            print(f"    {name + ':':12} {row[name]}")


if __name__ == "__main__":
    main()
