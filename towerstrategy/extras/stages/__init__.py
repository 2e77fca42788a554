"""Stages (towers of several devices) and micro-batches: placement and order of operations."""
