"""What the README shows, runs, and prints what it says it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_readme_python(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    # Another processor trains slightly other weights: layers, schemes and costs before are the same, ranks nearly.
    assert len(printed) == len(shown.splitlines())
    for ours, theirs in zip(printed, shown.splitlines(), strict=True):
        assert ours.split()[:2] == theirs.split()[:2] or "fewer MACs" in ours
    assert re.match(r"4\.0\d\dx fewer MACs: 29\.4 M -> 7\.\d M", printed[-1])
    assert (tmp_path / "digits-4x" / "model.safetensors").exists()


def test_the_example_for_detectors_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "detection.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(
        f"{example}\nprint(sorted(found[0]), result.speedup >= 1.5, backbone.speedup >= 1.5)"
    )
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['boxes', 'labels', 'scores'] True True"


def test_readme_tables_are_the_committed_results() -> None:
    results = ROOT / "benchmarks" / "results"
    for name in ("vgg16_imagenet.md", "solver-cpu.md", "solver-cuda.md"):
        assert (results / name).read_text().strip() in README, f"{name} changed; copy it into the README"
    networks = (ROOT / "docs" / "networks.md").read_text()
    assert (results / "residual.md").read_text().strip() in networks, (
        "residual.md changed; copy it into docs/networks.md"
    )
    engine = (ROOT / "docs" / "engine.md").read_text()
    for name in ("engine-cpu.md", "engine-cpu-memory.md", "engine-cuda.md", "kill.md"):
        assert (results / name).read_text().strip() in engine, f"{name} changed; copy it into docs/engine.md"
    count = len(json.loads((results / "zoo.json").read_text())["rows"])
    assert f"[a table of {count} networks](benchmarks/results/zoo.md)" in README


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_command_in_the_readme_exists() -> None:
    blocks = README.split("```")[1::2]
    block = next(block for block in blocks if "leanconv inspect" in block)
    for line in block.strip().splitlines():
        words = line.split("#")[0].split()
        done = subprocess.run(
            [sys.executable, "-m", "leanconv", words[1], "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0
        for word in words:
            assert not word.startswith("--") or word in done.stdout
