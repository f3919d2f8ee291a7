"""Bytes: untrusted files, checkpoints in folders and on the Hub, and durable output files."""
