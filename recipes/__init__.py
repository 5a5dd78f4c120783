"""Runnable recipes, read by name: `tercet train demo`."""
