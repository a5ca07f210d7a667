"""How long a run takes, how much memory it needs, and that it survives kill -9."""
