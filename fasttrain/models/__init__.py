"""Models of the recipes: their own, readable, and loading the weights of others."""
