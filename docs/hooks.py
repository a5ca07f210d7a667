"""For mkdocs: what pages link to outside docs/ comes into the site, and figures get their dark twins.

Links stay as the repository needs them (``../benchmarks/results/zoo.md``): files they name are added to the site under
their path from the root, a Python file as a page that shows it, and the links are led there.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)((?:#[^)\s]*)?)\)")
FIGURE = re.compile(r"!\[([^\]]*)\]\((figures/[\w-]+)\.svg\)")


def in_the_site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path == "CHANGELOG.md":
        return "changelog.md"
    return f"{path}.md" if path.endswith(".py") else path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = [Path(file.abs_src_path).read_text() for file in files.documentation_pages() if file.abs_src_path]
    wanted = {"CHANGELOG.md", *(found[0] for page in pages for found in OUTSIDE.findall(page))}
    for path in sorted(wanted):
        source = ROOT / path
        if not source.is_file():
            continue  # mkdocs then says which page has the dead link
        if path.endswith(".py"):
            content = f"# {path}\n\n```python\n{source.read_text()}```\n"
            files.append(File.generated(config, in_the_site(path), content=content))
        else:
            files.append(File.generated(config, in_the_site(path), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if "/" in page.file.src_uri:  # a file from outside docs/, as it is
        return markdown
    markdown = OUTSIDE.sub(lambda found: f"]({in_the_site(found[1])}{found[2]})", markdown)
    return FIGURE.sub(r"![\1](\2.svg#only-light)![\1](\2-dark.svg#only-dark)", markdown)
