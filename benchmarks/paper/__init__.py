"""The paper's experiments, and the parts of the method on their own."""
