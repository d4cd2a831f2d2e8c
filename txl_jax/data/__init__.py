"""Data pipeline: files become texts, texts token ids, and ids the segments of a batch."""
