"""Calibration: run text through the model and derive `input_scale`s from the inputs it records.

    documents, data  `--data` as documents, then as full rows of token ids
    run, collector   the forward pass; the observer that records largest magnitudes
    expert_rounding  GPTQ and weighted rounding of experts in the same pass
    statistics       `CalibrationStats`, its file, merging
    input_scales     `input_scale` of every quantized linear; which experts the data reached
    state            what a run saves so that it can resume

Only collector, run, expert_rounding and state import torch: a conversion with a statistics file
does not wait for it.
"""
