"""Global batch -> sub-batches: dealing rows, splitting batches, datasets, iterators, results."""
