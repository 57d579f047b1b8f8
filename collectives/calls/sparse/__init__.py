"""Collectives of sparse vectors."""
