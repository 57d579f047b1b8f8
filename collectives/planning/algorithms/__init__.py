"""The algorithms: which chunk goes where, for a topology. None of them knows of signals."""
