"""What a run needs of its machine: files, locks, checkpoints, logs, signals, other processes."""
