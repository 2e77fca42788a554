"""Several machines: the cluster, what crosses it, each one's part of the data, who still answers."""
