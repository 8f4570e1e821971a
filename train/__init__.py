"""Training of scorers on traces: ``python -m train fit --config ...``, then ``python -m train export CKPT DIR``."""
