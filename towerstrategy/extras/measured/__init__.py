"""``shares="measured"``: who is faster gets more rows, as the towers' times say."""
