"""Starts ranks as processes or threads."""
