"""The model Beam: its config.json and the names and roles of its tensors."""
