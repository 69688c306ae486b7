"""Students' copies of the notebooks: create, update with their work in them, show progress."""
