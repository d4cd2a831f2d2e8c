"""The jobs of a run: train, evaluate, generate. Each takes a config and works in one workdir."""
