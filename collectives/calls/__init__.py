"""How a rank makes a call: what it asks for, what the ranks agree on, and what carries it out."""
