"""Recipes: complete trainings, each a readable file and its configs."""
