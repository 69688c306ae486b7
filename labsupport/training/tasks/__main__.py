"""python -m labsupport.training.tasks: the tasks at full size."""

from benchmarks.tasks import main

if __name__ == "__main__":
    main()
