"""The table of a config's options, as the documentation shows it."""

from __future__ import annotations

from leanconv.system.fields import NO_DEFAULT, options


def table_of(config: type) -> str:
    """In Markdown."""
    rows = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for option in options(config):
        default = "" if option.default is NO_DEFAULT else f"`{option.default}`"
        rows.append(f"| `{option.name}` | {default} | {option.limits} | {option.help} |")
    return "\n".join(rows)
