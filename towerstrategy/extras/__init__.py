"""Features that the core does not import: the strategy attaches each of them at one seam."""
