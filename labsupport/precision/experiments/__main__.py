"""Measure every rule of the best-practice table on this machine."""

from labsupport.precision.experiments import main

if __name__ == "__main__":
    main()
