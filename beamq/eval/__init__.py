"""Judging checkpoints, from their files alone, however they were made."""
