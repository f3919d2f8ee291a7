"""Beam's own forward pass: any checkpoint format, a layer at a time, in plain torch.

`logits` runs a checkpoint; `run` streams layers over batches; `beam` is one layer, made of
`attention`, `moe` and `linear`; `load` (with `stored`, `fill`, `memory`) reads weights; `observe`
is how calibration and reports watch. Importing any of them imports torch; this file does not.
"""
