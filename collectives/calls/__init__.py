"""The communicator, and how a rank makes a call: what it asks for, what the ranks agree on, and
what carries it out."""
