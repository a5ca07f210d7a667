"""A network run in parts: a recorded list of operations, replayed for both networks (docs/streams.md)."""
