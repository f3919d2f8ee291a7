"""Calibration: what text flows through the model, what is recorded, and what scales follow.

    default_text   the text used when the user gives none: Python's standard library
    tokens         the checkpoint's own tokenizer
    rows, sources  files, folders and datasets as documents
    data           documents as rows of token ids (`CalibrationData`)
    stats          what calibration saw (`CalibrationStats`); merging
    stats_file     that as one safetensors file
    scales         `input_scale` of every quantized linear
    coverage       which experts the data reached

Nothing is re-exported: import from the module that makes a thing. None of these imports torch;
arrays are numpy's, so that converting with a statistics file does not wait for torch.
"""
