"""The commands: options in, exit code out."""
