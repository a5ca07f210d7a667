"""What a network is made of: its layers, which of them can be replaced, what they cost, and where it comes from."""
