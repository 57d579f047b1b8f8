"""Starts ranks as processes or threads, or joins ranks that a launcher has started."""
