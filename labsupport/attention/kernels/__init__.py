"""FlashAttention as GPU kernels: each kernel in one file, with its launcher.

    common         what the kernels share: which tiles, and which entries of a tile, are visible
    forward        one program for each block of queries: O and the log-sum-exp
    backward       one program for each block of keys: dK, dV; one for each block of queries: dQ
    hopper         both passes for Hopper GPUs, with tiles fetched by the TMA unit
    decode         one or a few queries against a long cache: programs share the keys
    forward_gluon, backward_gluon   both passes for Hopper GPUs once more, with different jobs for
                   groups of warps
    forward_fp8    the forward for Hopper GPUs in 8 bits, and the rounding before it
    version1       the forward in the order of FlashAttention's first version, for comparison
    template       the forward with the softmax update left to its caller: an exercise
    config         block sizes, warps, stages and splits
    autograd       the way in: which kernels run a call, autograd, torch.compile, fake tensors
    mode           compiled or interpreted

On a GPU the kernels are compiled. Elsewhere Triton's interpreter runs the same code with NumPy.
Files with kernels import Triton, so they are imported when first used; `config`, `autograd` and
`mode` do without.
"""
