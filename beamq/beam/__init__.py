"""beam."""
