"""Generation: one prefill, many decode steps, and what each of them costs.

prompts         from texts to a batch of tokens, padded on the left
generate        the loop: prefill, then one token at a time, through Transformers' models and caches
memory_sampler  how much memory a block of code takes, at the peak and on average
steps           one token through a Llama, written over the model's own weights
linear          the kernels of such a step around its attention
cuda_graph      a fast loop over such a step: fixed shapes, compiled, captured as a CUDA graph
compare         the same weights and prompt under two kinds of attention, judged by an exact model
"""
