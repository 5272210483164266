"""The built-in strategies, a file a slot. Each is a pure function, a frozen Config and a thin class."""
