"""Towers of several devices, and micro-batches: who does what where, and in which order."""
