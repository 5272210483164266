"""torch.compile: what is compiled, what came of it, and what it costs. Knows torch alone."""
