"""Tokens: vocabularies, and the stores of token ids."""
