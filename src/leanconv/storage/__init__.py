"""Results and unfinished runs on disk: the saved folder, the workdir, and figures recorded beside a result."""
