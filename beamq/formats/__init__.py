"""Number formats: what NVFP4, FP8 and MXFP8 are, how values become codes and codes become values.

`numerics`, `nvfp4`, `fp8` and `gptq` are plain torch, written to be read, and run on any device.
`kernels` has fast versions that give the same bytes; `kernels.cpu` works without torch. In all of
them value = code * block_scale * global_scale. Nothing is imported here, so that users of
`kernels.cpu` do not wait for torch.

Shapes, as suffixes of names (`w_NK`) and in docstrings:

    E  experts                          N  output rows of a weight       K  input columns
    B  blocks of 16 in a row, K / 16    H  bytes of packed codes, K / 2  T, S  tokens
    G  tensors of a stack, or groups    R, C  rows and columns of a table of scales

    codes         U8 [N, H]: two 4-bit codes a byte, even k in the low nibble, odd k in the high one
                  (NVFP4); E4M3 [N, K] (FP8, MXFP8)
    block_scale   E4M3 [N, B], row by row, positive (NVFP4)
    global_scale  FP32 [], amax / 2688, a multiplier (NVFP4); FP8 has a scale FP32 [N, 1], or one
                  for each block of 128 x 128; MXFP8 a byte for 32 values of a row: 2^(byte - 127)
"""
