"""Models side by side: how a quantized model differs from its source."""
