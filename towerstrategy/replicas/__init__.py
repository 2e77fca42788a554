"""Runs a replica function on each tower, from one trace or in a thread for each tower."""
