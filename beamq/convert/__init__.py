"""Conversion: read the source, quantize or decode it, write shards that can be resumed."""
