"""One checkpoint judged: its structure, values, checksums and, if given, its source."""
