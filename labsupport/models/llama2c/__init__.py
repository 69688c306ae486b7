"""llama2.c's files: a checkpoint of seven integers and many floats, and its tokenizer."""
