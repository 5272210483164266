"""Slots, strategies, the plan: how tricks compose. Knows no strategy by name."""
