"""tercet.training."""
