"""What every layer does to the output: one of them approximated at a time, in the otherwise original network."""
