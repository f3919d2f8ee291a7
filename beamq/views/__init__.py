"""What commands print: results as tables and lines."""
