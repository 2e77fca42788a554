"""For people to read: where everything sits, how busy the towers are, what is held where."""
