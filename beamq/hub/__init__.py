"""Traffic with the Hugging Face Hub."""
