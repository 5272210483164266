"""Modules and helpers on modules that know torch alone."""
