"""The command line. The first word decides the command; without one it is training."""

from fasttrain.cli.main import main

__all__ = ["main"]
