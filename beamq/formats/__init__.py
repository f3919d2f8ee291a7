"""Number formats: what NVFP4 and FP8 are, how values become codes and codes values again.

`numerics`, `nvfp4` and `fp8` are plain torch, written to be read, and run on any device. `kernels`
holds fast versions that give the same bytes: `kernels.cpu` works on raw buffers without torch.
One direction everywhere: value = code * block_scale * global_scale.

Nothing is imported here, so that the raw-buffer path stays free of torch's import time.
"""
