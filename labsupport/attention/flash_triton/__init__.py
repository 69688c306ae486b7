"""FlashAttention as Triton kernels: the algorithm of `flash_torch.py`, on the tensor cores.

    tiles        what the kernels share: which tiles, and which entries of a tile, are visible
    forward      one program for each block of queries:  O and the log-sum-exp L
    backward     one program for each block of keys:     dK, dV
                 one program for each block of queries:  dQ
    forward_hopper, backward_hopper      the same for Hopper GPUs, tiles fetched by the copy engine
    decode       one or a few queries against a long cache: keys are shared out among programs
    version1     the forward pass as FlashAttention's first version did it, to be measured beside it
    with_update  the forward pass with the update of (m, l, acc) left to its caller: an exercise
    tuning       block sizes, warps and stages, by head_dim and dtype
    launch       from tensors to kernels: which ones (launch_plain, launch_hopper: their arguments;
                 launch_decode: the same for decode; geometry: shapes and strides)
    operators    the same as PyTorch operators: autograd, torch.compile, fake tensors

On a GPU the kernels are compiled. Elsewhere Triton's interpreter runs the very same code with
NumPy: slowly, but everybody can step through it. (It computes bfloat16 wrongly, so there float16
and float32 only.) Triton is imported by these files alone, when the first of them is needed.
"""
