"""From a plan to a finished folder: reading, kernels, writing, resuming."""
