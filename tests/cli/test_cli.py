"""The command line: exit codes and what is printed."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

import leanconv
from tests.support.command import ACCELERATE, COMMON, NETWORK
from tests.support.pictures import write_picture


def test_from_photos_to_a_saved_network_and_back(place: Path, leanconv_command) -> None:
    code, out, err = leanconv_command(f"{ACCELERATE} --out fast")
    assert code == 0, err
    assert "fewer MACs" in out
    assert "saved to fast" in out
    code, out, err = leanconv_command("evaluate fast --model net.py:build --data photos --workers 0 --device cpu")
    assert code == 0, err
    assert "of 8 images" in out
    code, out, _ = leanconv_command(
        "evaluate fast --model net.py:build --data photos --workers 0 --device cpu --json --quiet"
    )
    found = json.loads(out)
    assert found["images"] == 8
    assert 0 <= found["top1"] <= found["top5"] <= 1
    code, out, _ = leanconv_command("inspect fast --model net.py:build --size 16 --device cpu")
    assert code == 0
    assert "2.expand" in out


def test_json_is_all_that_is_printed(place: Path, leanconv_command) -> None:
    code, out, _ = leanconv_command(f"{ACCELERATE} --out fast --json --quiet --scheme channel --ranks uniform")
    assert code == 0
    found = json.loads(out)
    assert 2 <= found["speedup"] < 2.04
    assert found["folder"] == "fast"
    assert found["source"]["name"] == "net.py:build"
    assert found["layers"][0]["scheme"] == "channel"


def test_the_paper_is_its_fit_and_ranks_by_energy(place: Path, leanconv_command) -> None:
    found = []
    for name, words in {"paper": "--paper", "spelt-out": "--refine none --ranks energy", "default": ""}.items():
        code, out, err = leanconv_command(f"{ACCELERATE} {words} --out {name} --json --quiet")
        assert code == 0, err
        found.append(json.loads(out))
    weights = [safetensors.torch.load_file(place / one["folder"] / "model.safetensors") for one in found]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert found[0]["layers"] == found[1]["layers"] != found[2]["layers"]
    assert [(one["options"]["refine"], one["options"]["ranks"]) for one in found] == [
        ("none", "energy"),
        ("none", "energy"),
        ("closed-form", "auto"),
    ]


def test_threads_are_those_of_the_run(place: Path, leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, set_them = [], torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda count: (seen.append(count), set_them(count)))
    code, _, err = leanconv_command(f"{ACCELERATE} --out fast --threads 2")
    assert code == 0, err
    assert " on 2 threads: " in err
    assert seen == [2, 1] * 3  # analyze, plan, apply: put back after each
    code, _, err = leanconv_command(f"{ACCELERATE} --out other --threads 5000")
    assert code == 2
    assert "--threads" in err
    assert "less than or equal to 1024" in err


def test_weights_files(place: Path, leanconv_command) -> None:
    namespace: dict = {}
    exec(NETWORK, namespace)
    state = {key: value + 0.01 for key, value in namespace["build"]().state_dict().items()}
    safetensors.torch.save_file(state, place / "w.safetensors")
    torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, place / "w.pth")
    outputs = []
    for name in ("w.safetensors", "w.pth"):
        code, _, err = leanconv_command(f"{ACCELERATE} --weights {name} --out from-{name} --quiet")
        assert code == 0, err
        outputs.append(leanconv.load(place / f"from-{name}", namespace["build"]())(torch.ones(1, 3, 16, 16)))
    assert torch.equal(*outputs)
    torch.save(torch.nn.Linear(2, 2), place / "pickle.pth")
    code, _, err = leanconv_command(f"{ACCELERATE} --weights pickle.pth --out x")
    assert code == 2
    assert "cannot be read as plain weights" in err
    safetensors.torch.save_file({"0.weight": torch.zeros(3)}, place / "other.safetensors")
    code, _, err = leanconv_command(f"{ACCELERATE} --weights other.safetensors --out x")
    assert code == 2
    assert "does not fit the network: it lacks" in err


def test_tar_of_images_and_ranks_by_hand(place: Path, leanconv_command) -> None:
    with tarfile.open(place / "photos.tar", "w") as archive:
        archive.add(place / "photos", "photos")
    (place / "ranks.json").write_text('{"2": [9, 7]}')
    code, out, err = leanconv_command(
        f"accelerate net.py:build --images photos.tar --ranks ranks.json --out fast {COMMON}"
    )
    assert code == 0, err
    assert "9 x 7" in out


# The paper's complexity column for VGG-16, in percent.
PAPER = [0.6, 12.0, 6.0, 12.0, 6.0, 12.1, 12.1, 6.0, 12.1, 12.1, 3.0, 3.0, 3.0]


def test_inspect_vgg16_gives_the_papers_shares(leanconv_command) -> None:
    code, out, err = leanconv_command("inspect vgg16 --json --device cpu")
    assert code == 0, err
    layers = json.loads(out)["layers"]
    assert [layer["name"] for layer in layers][:3] == ["features.0", "features.2", "features.5"]
    assert [100 * layer["share"] for layer in layers] == pytest.approx(PAPER, abs=0.1)
    assert layers[1]["out_size"] == [224, 224]
    assert {layer["activation"] for layer in layers} == {"relu"}


def test_inspect_measures_sparsity(place: Path, leanconv_command) -> None:
    code, out, err = leanconv_command(f"inspect net.py:build --images photos {COMMON} --json")
    assert code == 0, err
    sparsity = [layer["sparsity"] for layer in json.loads(out)["layers"]]
    assert all(0 < value < 1 for value in sparsity)
    code, out, _ = leanconv_command("inspect net.py:build --size 16 --layers all --device cpu")
    assert code == 0
    assert "Linear" in out
    assert "give --images" in out


REFUSALS = [
    ("accelerate vgg61 --images photos --out x --weights none", "did you mean vgg19 or vgg16"),
    ("accelerate net.py:biuld --images photos --out x", "did you mean build"),
    ("accelerate net.py:broken --images photos --out x", "no such luck"),
    ("accelerate net.py:text --images photos --out x", "must return a torch.nn.Module"),
    ("accelerate nothing.py:build --images photos --out x", "there is no file"),
    ("accelerate net.py:build --images nowhere --out x", "does not exist"),
    ("accelerate net.py:build --images empty --out x", "no images in"),
    ("accelerate net.py:build --images photos --out photos", "exists already"),
    ("accelerate net.py:build --images photos --out x --speedup 1", "above 1"),
    ("accelerate net.py:build --images photos --out x --size 16 --speedup 999", "cannot be reached"),
    ("accelerate net.py:build --images photos --out x --scheme 5d", "scheme='5d'"),
    ("accelerate net.py:build --images photos --out x --ranks {", "not valid JSON"),
    ("accelerate net.py:build --images photos --out x --size 16 --skip 22", "did you mean 2"),
    ("accelerate net.py:build --images photos --out x --weights nowhere.pth", "does not exist"),
    ("accelerate net.py:grey --images photos --out x --size 16", "takes 1 input channels but was given 3"),
    ("accelerate net.py:build --images photos --out x --mean 1,2", "must be 3 numbers"),
    ("accelerate net.py:build --images photos --out x --device toaster", "cannot be used here"),
    ("accelerate photos --images photos --out x", "not a saved one"),
    ("accelerate timm:resnet50 --images photos --out x", "pip install 'leanconv[timm]'"),
    ("accelerate vgg16 --images photos --out x --weights IMAGENET", "did you mean"),
    ("accelerate vgg16 --images photos --out x --weights DEFAULT", "could not be fetched"),
    ("evaluate photos --data photos", "has no leanconv.json"),
    ("evaluate net.py:build --data flat", "in no class folder"),
    ("evaluate squeezenet1_1 --weights none --size 64 --data photos", "2 class names but the network 1000 outputs"),
    ("inspect net.py:build --layers some", "use conv or all"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS, ids=[a for a, _ in REFUSALS])
def test_bad_input_exits_2_with_one_sentence(
    arguments: str, message: str, place: Path, leanconv_command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "empty").mkdir()
    write_picture(place / "flat" / "a.png")
    monkeypatch.setitem(sys.modules, "timm", None)  # as if not installed
    monkeypatch.setattr("torch.hub.load_state_dict_from_url", offline)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    before = sorted(place.rglob("*"))
    code, out, err = leanconv_command(f"{arguments} --workers 0")
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert sum(line.startswith("leanconv: error:") for line in err.splitlines()) == 1
    after = sorted(p for p in place.rglob("*") if "__pycache__" not in p.parts)
    assert after == before


def offline(*args, **kwargs):
    raise OSError("no network")


def test_errors_are_json_too(place: Path, leanconv_command) -> None:
    code, out, _ = leanconv_command("accelerate net.py:build --images nowhere --out x --json")
    assert code == 2
    assert "does not exist" in json.loads(out)["error"]


def test_bad_pictures_are_named(place: Path, leanconv_command) -> None:
    (place / "photos" / "cat" / "9.png").write_bytes(b"not a png")
    code, _, err = leanconv_command(f"{ACCELERATE} --out x")
    assert code == 2
    assert "cat/9.png" in err
    assert not (place / "x").exists()


def test_unexpected_errors_are_one_line(place: Path, leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args, **kwargs):
        raise RuntimeError("surprise")

    monkeypatch.setattr("leanconv.images.find_pictures", explode)
    code, _, err = leanconv_command(f"{ACCELERATE} --out x")
    assert code == 1
    assert "unexpected RuntimeError: surprise" in err
    assert "Traceback" not in err


def test_help_is_quick_and_does_not_import_torch() -> None:
    script = (
        "import sys; sys.argv = ['leanconv', 'accelerate', '--help']\n"
        "from leanconv.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit as e:\n    assert not e.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Examples:" in done.stdout


def test_python_dash_m(place: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "leanconv", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"leanconv {leanconv.__version__}"


def test_a_grey_folder_remembers_how_it_was_made(place: Path, leanconv_command) -> None:
    code, _, err = leanconv_command(
        "accelerate net.py:grey --images photos --speedup 1.2 --out fast --channels 1 --no-skip --samples 200 "
        f"--ranks energy {COMMON}"
    )
    assert code == 0, err
    code, out, err = leanconv_command("inspect fast --model net.py:grey --device cpu --json")
    assert code == 0, err
    assert json.loads(out)["layers"][0]["out_size"] == [14, 14]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("evaluate net.py:grey --data photos --size 16", "the model raised RuntimeError"),
        ("evaluate net.py:build --data photos --size 16 --std 0,0,0", "must be above 0"),
        ("evaluate net.py:build --data photos --size 16 --mean nan,0,0", "must be 3 numbers"),
        ("evaluate net.py:spoilt --data photos --size 16", "layer '0' has NaN"),
        ("accelerate net.py:build --images photos --out x --seed 18446744073709551616", "seed="),
        (f"accelerate net.py:build --images photos --out {'n' * 300}", "cannot be the name of a folder"),
    ],
)
def test_more_bad_input(arguments: str, message: str, place: Path, leanconv_command) -> None:
    (place / "net.py").write_text(
        NETWORK + "\ndef spoilt():\n    net = build()\n    net[0].weight.data.fill_(float('nan'))\n    return net\n"
    )
    code, out, err = leanconv_command(f"{arguments} --workers 0 --device cpu")
    assert code == 2
    assert message in err
    assert out == ""


def test_json_stays_pure_whatever_the_users_file_prints(place: Path, leanconv_command) -> None:
    (place / "loud.py").write_text("print('hello')\n" + NETWORK)
    code, out, err = leanconv_command("inspect loud.py:build --size 16 --device cpu --json")
    assert code == 0, err
    assert json.loads(out)["macs"] > 0
    assert "hello" in err


@pytest.mark.parametrize(
    "arguments", ["accelerate net.py:build --images photos", "inspect", "evaluate --no-such-option", "no-such-command"]
)
def test_usage_errors_are_one_sentence_too(arguments: str, place: Path, leanconv_command) -> None:
    code, out, err = leanconv_command(f"{arguments} --json")
    assert code == 2
    assert len(err.splitlines()) == 1
    assert json.loads(out)["error"] in err


def test_exit_in_the_users_file_is_no_success(place: Path, leanconv_command) -> None:
    (place / "quits.py").write_text("import sys\ndef build():\n    sys.exit()\n")
    code, _, err = leanconv_command("inspect quits.py:build")
    assert code == 2
    assert "raised SystemExit" in err


def test_a_reader_that_goes_away_is_no_error(place: Path) -> None:
    command = (
        f"{sys.executable} -m leanconv inspect net.py:build --size 16 --device cpu | true; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
