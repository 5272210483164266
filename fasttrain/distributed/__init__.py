"""Joining ranks, summing over them, stopping them together, averaging their gradients."""
