"""The user's arguments -> devices of towers, merging and variables."""
