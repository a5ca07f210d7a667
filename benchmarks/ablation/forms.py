"""Which form loses least at the same MACs, and how long it takes: channel, 3d, Tucker-2, and all together.

    python -m benchmarks.ablation.forms --data DIR --model vgg16-imagenet --device cuda --work WORK
    python -m benchmarks.ablation.forms --data CIFAR --model resnet20-cifar10 --device cuda --work WORK
    python -m benchmarks.ablation.forms --data DIR --model vgg16-imagenet --times --work WORK    # one CPU thread

DIR and CIFAR: see benchmarks/README.md. Each cell (network, scheme, ranks, speed-up, seed) is a file in --work and is
not computed again. It is solved twice: on all calibration pictures, judged on the evaluation pictures; and on four
fifths of them, judged by its KL on the others ("KL, held out"). What the default is made of is decided by the second
alone. --times takes the forms and ranks of the cells of seed 0 and times all of one speed-up in turns, with random
factors: batch 1, one CPU thread, onnxruntime and torch, against the original there.
Writes benchmarks/results/forms.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import leanconv
from benchmarks.common.machine import commit, machine
from benchmarks.common.results import RESULTS, slug, write_results
from benchmarks.common.subjects import NETWORKS, Subject, held_out, original_of
from leanconv.config import Options
from leanconv.forms import FORMS, MERGED, Choice
from leanconv.forms.replace import change_of, replace
from leanconv.network.user_model import copied
from leanconv.pipeline.prepare import prepare
from leanconv.runtimes.bench.machine import machine as timed_on
from leanconv.runtimes.bench.machine import threads_set
from leanconv.runtimes.bench.measure import interleaved, paired_ratio
from leanconv.runtimes.runners import RUNTIMES, Conditions
from leanconv.system.atomic_files import write_whole

ALL = "channel+spatial+3d+tucker2"
SCHEMES = ("channel", "3d", "tucker2", ALL)
# For the search over forms of all layers together; with "energy" the paper's selection, where there is one.
RANKS = ("energy", "sensitivity")
SPEEDUPS = {"vgg16-imagenet": (2.0, 3.0, 4.0, 5.0), "resnet20-cifar10": (1.5, 2.0, 3.0), "vgg16-cifar10": (2.0, 4.0)}
RUNNERS = ("onnxruntime", "torch")


def name_of(model: str, scheme: str, ranks: str, speedup: float, seed: int) -> str:
    return f"{model}-{slug(scheme)}-{ranks}-{speedup:g}x-seed{seed}.json"


def solved(subject: Subject, scheme: str, ranks: str, speedup: float, seed: int) -> leanconv.Accelerated:
    return leanconv.accelerate(
        subject.model,
        subject.calibration,
        speedup,
        scheme=scheme,
        ranks=ranks,
        seed=seed,
        progress=False,
        device=subject.device,
    )


def cell(subject: Subject, apart: Subject, scheme: str, ranks: str, speedup: float, seed: int) -> dict[str, Any]:
    """``apart``: the same network with a fifth of the calibration pictures held out."""
    found: dict[str, Any] = {"model": subject.name, "scheme": scheme, "ranks": ranks, "speedup": speedup, "seed": seed}
    try:
        result = solved(subject, scheme, ranks, speedup, seed)
        score = subject.score(result.model)
        found |= {
            "macs": result.speedup,
            "increase": subject.increase(score),
            "agreement": 100 * score.agreement,
            "kl": score.kl,
            "forms": {layer.name: [layer.scheme, *layer.ranks] for layer in result.layers},
            "kl held out": apart.score(solved(apart, scheme, ranks, speedup, seed).model).kl,
        }
    except leanconv.LeanconvError as error:  # too few forms for so much
        found["refused"] = str(error)
    return {**found, "machine": machine(subject.device), "original": original_of(subject)}


def times(subject: Subject, cells: list[dict[str, Any]], seconds: float) -> dict[str, dict[str, Any]]:
    """Milliseconds of the networks of ``cells`` (one speed-up), by runtime and scheme, all in turns. Weights do not
    matter to the clock: factors are random."""
    model, example = subject.model.cpu().eval(), subject.calibration[0][:1].cpu().contiguous()
    sites = prepare(model, torch.cat([example, example]), Options.check(skip=[]), torch.device("cpu")).sites
    networks = {"original": model}
    for one in cells:
        networks[one["scheme"]] = network = copied(model)
        for name, (form, *ranks) in one["forms"].items():
            if form != MERGED.name:
                replace(network, change_of(sites[name], Choice(FORMS[form], tuple(ranks))))
    conditions, found = Conditions(device=torch.device("cpu"), threads=1), {}
    for runner in RUNNERS:
        with threads_set(1), torch.inference_mode():
            calls = {name: RUNTIMES[runner].prepare(net, example, conditions) for name, net in networks.items()}
            rounds = interleaved(calls, seconds=seconds, finish=lambda: None).times
        for name in networks:
            ratio = paired_ratio(rounds["original"], rounds[name])
            found.setdefault(name, {})[runner] = {
                "ms": 1e3 * statistics.median(rounds[name]),
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            }
    return found


def table(cells: list[dict[str, Any]], clock: dict[str, Any]) -> str:
    """Medians over seeds; times are of seed 0."""
    lines = [
        "# Forms at the same MACs",
        "",
        "`python -m benchmarks.ablation.forms`, see its docstring. Medians over the seeds; KL of the outputs from",
        "the original's. Increase: of the top-5 error of VGG-16, of the top-1 error of ResNet-20, in points. Times:",
        "one CPU thread, batch 1, as a ratio original / accelerated in turns (95 % interval). Energy ranks of all",
        "forms together were measured before they were refused: energies of input channels and of filters do not",
        "compare.",
    ]
    lines += ["", f"KL on {', '.join(sorted({one['machine'] for one in cells}))}."]
    machines = [found["machine"] for found in clock.values()]
    places = {", ".join([one["cpu"], *(f"{name} {one[name]}" for name in RUNNERS)]) for one in machines}
    lines += [f"Times on {place}." for place in sorted(places)]
    for model in dict.fromkeys(one["model"] for one in cells):
        mine = [one for one in cells if one["model"] == model]
        lines += [
            "",
            f"## {model}",
            "",
            "| speed-up | ranks | scheme | KL, held out | KL | increase | onnxruntime | torch |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|"]
        timed = next((found for key, found in clock.items() if key.startswith(f"{model} ")), None)
        if timed is not None:
            ms = " | ".join(f"{timed['original'][runner]['ms']:.3g} ms" for runner in RUNNERS)
            lines.append(f"| 1x | | original | | | | {ms} |")
        for speedup in dict.fromkeys(one["speedup"] for one in mine):
            for ranks in RANKS:
                for scheme in SCHEMES:
                    some = [
                        one for one in mine if (one["speedup"], one["ranks"], one["scheme"]) == (speedup, ranks, scheme)
                    ]
                    good = [one for one in some if "kl" in one]
                    if not some:
                        continue
                    head = f"| {speedup:g}x | {ranks} | {scheme} |"
                    if not good:
                        lines.append(f"{head} refused | | | | |")
                        continue
                    held, kl = (statistics.median(one[key] for one in good) for key in ("kl held out", "kl"))
                    increase = statistics.median(one["increase"] for one in good)
                    timed = clock.get(f"{model} {speedup:g} {ranks}", {}).get(scheme, {})
                    ms = [
                        f"{timed[runner]['ms']:.3g} ms, {timed[runner]['ratio']:.2f}x "
                        f"({timed[runner]['low']:.2f} to {timed[runner]['high']:.2f})"
                        if runner in timed
                        else ""
                        for runner in RUNNERS
                    ]
                    lines.append(f"{head} {held:.4f} | {kl:.4f} | {increase:.2f} | {' | '.join(ms)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=list(SPEEDUPS), default="vgg16-imagenet")
    parser.add_argument("--speedups", nargs="+", type=float, help="default: those of the network's table")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--ranks", nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--times", action="store_true", help="take the times of the cells of seed 0")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the times of one runtime and speed-up")
    parser.add_argument("--limit", type=int, help="pictures, for a trial")
    parser.add_argument("--code", default=commit(), help="the commit the cells are said to be of")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    subject = NETWORKS[options.model](options.data, options.device, options.limit)
    clock_file = options.work / "times.json"
    clock = json.loads(clock_file.read_text()) if clock_file.exists() else {}
    speedups = options.speedups or SPEEDUPS[options.model]
    if options.times:
        for speedup in speedups:
            for ranks in options.ranks:
                files = [options.work / name_of(options.model, scheme, ranks, speedup, 0) for scheme in options.schemes]
                cells = [json.loads(file.read_text()) for file in files if file.exists()]
                cells = [one for one in cells if "forms" in one]
                if cells:
                    found = times(subject, cells, options.seconds)
                    clock[f"{options.model} {speedup:g} {ranks}"] = {
                        **found,
                        "machine": timed_on(torch.device("cpu"), 1),
                    }
                    write_whole(clock_file, json.dumps(clock))
                    print(
                        speedup,
                        ranks,
                        {name: round(one["torch"]["ratio"], 2) for name, one in found.items()},
                        flush=True,
                    )
    else:
        apart = held_out(NETWORKS[options.model](options.data, options.device, options.limit))
        for seed in options.seeds:
            for speedup in speedups:
                for ranks in options.ranks:
                    for scheme in options.schemes:
                        file = options.work / name_of(options.model, scheme, ranks, speedup, seed)
                        if not file.exists():
                            one = cell(subject, apart, scheme, ranks, speedup, seed)
                            write_whole(file, json.dumps({**one, "code": options.code}))
                            print(
                                file.stem, {key: one.get(key) for key in ("kl held out", "kl", "increase")}, flush=True
                            )
    cells = [json.loads(file.read_text()) for file in sorted(options.work.glob("*-seed*.json"))]
    cells.sort(key=lambda one: (one["model"], one["speedup"], RANKS.index(one["ranks"]), SCHEMES.index(one["scheme"])))
    write_results(options.out, "forms", {"cells": cells, "times": clock}, table(cells, clock))


if __name__ == "__main__":
    main()
