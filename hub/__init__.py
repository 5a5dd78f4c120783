"""tercet.hub."""
