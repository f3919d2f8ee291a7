"""Where trainers call for quantized weights: functions with the signatures that they expect.

Each module is thin: it names Beam's parts in a framework's terms and calls `quantize_tensors`. None
is imported by beamq, and a framework is imported by none but `skyrl.register`, when it is called.
"""
