"""Embeddings whose columns are divided among ranks (EmbRace)."""
