"""Sources: the bytes of published corpora and of the user's own files."""
