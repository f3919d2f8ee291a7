"""Products of activations and quantized weights: an exact reference, and GPU back ends."""
