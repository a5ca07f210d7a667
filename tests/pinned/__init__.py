"""Facts about what the library computes, recorded once and checked for ever after."""
