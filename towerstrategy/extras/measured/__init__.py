"""``shares="measured"``: measures the towers, and gives more rows to faster ones."""
