"""From files to segments: bytes are read (sources), become tokens (vocabulary, corpus) and are dealt out (segments)."""
