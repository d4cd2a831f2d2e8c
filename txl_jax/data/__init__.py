"""Data pipeline: files are read (sources), become token ids (tokens), and are cut into segments (batches)."""
