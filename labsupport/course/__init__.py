"""Students' copies of the notebooks: made, renewed with their work kept, and their progress."""
