"""Time, not multiply-accumulates: two networks measured side by side on the machine they must run on."""
