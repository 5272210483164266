"""The same trainings in plain PyTorch: the specification of the recipes, and the baseline of the benchmarks."""
