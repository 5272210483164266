"""Read a config: `load` a file, `check` it without raising, or take keywords. Nothing here imports torch."""

from fasttrain.config.resolve import Problems, Resolved, check, from_keywords, load, peek
from fasttrain.config.settings import Settings, seconds

__all__ = ["Problems", "Resolved", "Settings", "check", "from_keywords", "load", "peek", "seconds"]
