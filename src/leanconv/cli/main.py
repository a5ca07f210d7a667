"""The ``leanconv`` command: its subcommands, and errors as one sentence."""

from __future__ import annotations

import os
import sys

from leanconv import __version__
from leanconv.errors import LeanconvError

try:
    import typer
except ModuleNotFoundError:  # pragma: no cover - typer is a dependency; this is for installs without dependencies
    sys.exit("leanconv: the command line needs typer and rich; pip install typer rich.")

from leanconv.cli import common
from leanconv.cli.accelerate import accelerate
from leanconv.cli.bench import bench
from leanconv.cli.compare import compare
from leanconv.cli.demo import demo
from leanconv.cli.doctor import doctor
from leanconv.cli.evaluate import evaluate
from leanconv.cli.export import export
from leanconv.cli.finetune import finetune
from leanconv.cli.inspect import inspect
from leanconv.cli.options import with_single_options
from leanconv.cli.report import report

app = typer.Typer(
    name="leanconv",
    help="Make a trained convolutional network several times cheaper to run, from a few unlabelled images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (accelerate, inspect, evaluate, finetune, bench, export, report, compare, doctor, demo):
    app.command()(with_single_options(command))


INTERRUPTED = 130  # as shells have it: 128 and the number of the signal


def _version(asked: bool) -> None:
    if asked:
        print(f"leanconv {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def run() -> None:
    """Exit 0 on success, 2 with one sentence on bad input, 130 when interrupted."""
    try:
        with common.only_json("--json" in sys.argv):
            code = app(standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # the parser's word for Ctrl-C
            _stopped()
    except LeanconvError as error:
        _say(str(error))
        sys.exit(2)
    except SystemExit as end:
        # The parser meets a closed pipe before we do, wraps stdout so that nothing more is said, and exits 1.
        sys.exit(0 if type(sys.stdout).__name__ == "PacifyFlushWrapper" else end.code)
    except BrokenPipeError:
        # The reader of our output went away (`leanconv inspect vgg16 | head`): that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        _stopped()
    except Exception as error:
        if type(error).__name__ == "Abort":
            _stopped()
        if hasattr(error, "format_message"):  # a usage error of the command line parser
            _say(f"{error.format_message().rstrip('.')}; see --help.")
            sys.exit(2)
        if os.environ.get("LEANCONV_DEBUG"):
            raise
        said = " ".join(str(error).split())
        _say(f"unexpected {type(error).__name__}: {said} (LEANCONV_DEBUG=1 shows where)")
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _stopped() -> None:
    print("leanconv: stopped", file=sys.stderr)
    sys.exit(INTERRUPTED)


def _say(sentence: str) -> None:
    print(f"leanconv: error: {sentence}", file=sys.stderr)
    if "--json" in sys.argv:
        common.print_json({"error": sentence})
