"""Several machines: the cluster, what crosses it, each one's data, and who still answers."""
