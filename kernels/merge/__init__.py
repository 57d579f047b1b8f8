"""Merging of sparse vectors, and their messages."""
