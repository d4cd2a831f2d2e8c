"""Services of the machine for a run: files, locks, checkpoints, logs, signals, other processes."""
