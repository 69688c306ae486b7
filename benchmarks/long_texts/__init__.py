"""What a model finds in a long text: planted facts, calls in a file, summaries."""
