"""Several machines: the cluster and its health, collectives, and each worker's data."""
