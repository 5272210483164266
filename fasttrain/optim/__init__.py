"""Optimizer helpers that know torch alone."""
