"""How a run is repeated: the command as it was typed, or the call in Python that its options amount to."""

from __future__ import annotations

import itertools
import os
import shlex
from pathlib import Path
from typing import Any

from leanconv.config import Options

# What a command shows in place of a network that leanconv cannot name.
UNKNOWN = "MODEL"
# Options of accelerate that say which weights the original has.
OF_ORIGINAL = ("--weights", "--num-classes")
# Options that with --ranks latency are about what is timed.
BY_TIME = ("--latency", "--runtime", "--threads", "--dtype")


def repeat(data: dict[str, Any]) -> str:
    """``data``: the content of leanconv.json."""
    if data.get("command") is not None:
        return shlex.join(data["command"])
    defaults = Options.check().to_json()
    # Through the options: a folder may be from before one of them was there.
    values = {key: value for key, value in Options.from_json(data["options"]).to_json().items() if value is not None}
    arguments = [
        f"{key}={value!r}" for key, value in values.items() if key in ("speedup", "scheme") or value != defaults[key]
    ]
    return f"leanconv.accelerate(model, images, {', '.join(arguments)})"


def original_of(data: dict[str, Any]) -> str:
    """The network before, as the command line calls it."""
    command = data.get("command") or []
    if "accelerate" in command:
        after = command[command.index("accelerate") + 1 :]
        if after and not after[0].startswith("-"):
            return str(after[0])
    source = data["source"]
    if source["library"] == "other":
        return UNKNOWN
    name: str = source["name"]
    return name if source["library"] == "torchvision" else f"{source['library']}:{name}"


def original_options(command: list[str]) -> list[str]:
    """The options of ``command`` that say which weights the original has."""
    options = []
    for name in OF_ORIGINAL:
        for word, following in itertools.pairwise([*command, ""]):
            if word == name:
                options += [name, following]
            elif word.startswith(f"{name}="):
                options += [name, word.removeprefix(f"{name}=")]
    return options


def plain_name(folder: str) -> str:
    """``folder`` spelt so that a word can be put behind its name: without a slash, and by name where it is ``.``."""
    path = Path(folder)
    if path.name in ("", ".."):
        path = Path(os.path.normpath(path / ".." / path.resolve().name))
    return str(path)


def at_another_speedup(data: dict[str, Any]) -> str:
    """The same with ``{speedup}`` for the target, and another folder to write where one is named; by energy."""
    mark = "{speedup}"
    if data.get("command") is None:
        options = {**data["options"], "speedup": None, "ranks": "energy", "target": None, "latency": None}
        plain = repeat({**data, "options": options})
        return plain.replace("(model, images, ", f"(model, images, speedup={mark}, ", 1)
    dropped = ("--speedup", "--ranks", "--out", *(BY_TIME if data["options"]["ranks"] == "latency" else ()))
    words: list[str] = []
    rest = iter(data["command"])
    for word in rest:
        name, equals, value = word.partition("=")
        if name in dropped:
            value = value if equals else next(rest, "")
            words += [name, f"{shlex.quote(plain_name(value))}-{mark}x"] if name == "--out" else []
        else:
            words.append(shlex.quote(word))
    return " ".join([*words, "--ranks", "energy", "--speedup", mark])
