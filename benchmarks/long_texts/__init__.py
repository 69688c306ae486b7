"""Tasks on a long text: planted facts, calls in a file, summaries."""
