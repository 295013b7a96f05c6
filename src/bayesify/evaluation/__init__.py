"""How far a network can be trusted."""
