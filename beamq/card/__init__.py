"""The model card that travels with the weights."""
