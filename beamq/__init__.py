"""beamq: NVFP4 and FP8 checkpoints of Reflection's Beam, converted, calibrated and verified."""
