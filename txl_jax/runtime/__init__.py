"""System services for a run: files, locks, checkpoints, logs, signals, other processes."""
