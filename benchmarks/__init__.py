"""Speed, memory and start-up of ``TowerStrategy`` beside its peers: ``python -m benchmarks``."""
