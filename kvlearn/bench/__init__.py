"""Speed and memory, measured: ``python -m kvlearn.bench NAME``."""
