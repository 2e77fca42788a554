"""``python -m towerstrategy check``, which tests a user's machine: a module for each question."""
