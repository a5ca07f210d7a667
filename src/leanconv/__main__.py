"""``python -m leanconv`` is the command."""

from leanconv.cli.main import run

if __name__ == "__main__":
    run()
