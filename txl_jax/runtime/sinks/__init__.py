"""Receivers of what a run reports, beside its own files: TensorBoard, Weights & Biases, and sinks of the caller's."""
