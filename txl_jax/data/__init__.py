"""Data pipeline: from files to texts, from texts to token ids, and from ids to segments."""
