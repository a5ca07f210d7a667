"""Libraries of other projects that an extra installs."""

from __future__ import annotations

import importlib
from typing import Any

from leanconv.errors import LeanconvError


def load(library: str, extra: str | None) -> Any:
    """The module ``library`` of an extra, or one sentence that says how to install it."""
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name == library:
            raise LeanconvError(f"{library} is not installed; pip install 'leanconv[{extra}]'.") from None
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise LeanconvError(f"{library} cannot be imported ({reason}); pip install --force-reinstall {library}.")
