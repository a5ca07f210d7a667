"""The command line: one thin file a command. torch is imported when a command runs, never for ``--help``."""
