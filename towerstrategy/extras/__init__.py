"""What the core does not know: each part hangs on one seam, put in by the strategy."""
