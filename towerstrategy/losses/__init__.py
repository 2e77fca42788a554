"""A tower's loss: a mean over its rows or a part of the batch's, found out and scaled."""
