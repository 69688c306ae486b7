"""python -m labsupport.training.tasks: the tasks at full size."""

from labsupport.training.tasks.measure import main

if __name__ == "__main__":
    main()
