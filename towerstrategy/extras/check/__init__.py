"""What ``python -m towerstrategy check`` does on a user's machine: a module per question."""
