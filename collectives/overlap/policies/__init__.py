"""One policy a file: a function of (profile, network) that gives a Schedule."""
