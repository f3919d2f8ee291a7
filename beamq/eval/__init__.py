"""Judging checkpoints: what the engines would make of them, and whether they are right.

Everything here reads files only. Nothing here knows how a checkpoint was made.
"""
