"""The kinds of layers: their geometry, padding and cost, and the modules that are built for them."""
