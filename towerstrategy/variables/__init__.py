"""The one copy, tower-local variables, and writes where towers cannot sync."""
