"""Global batch -> sub-batches: rows, splitting batches, datasets, iterators, results."""
