"""How much 12 draws cost, as multiples of one plain forward of the same network, and how peers do.

    make bench-speed            # builds .venv-bench with the peers, and runs everything
    python benchmarks/speed.py [PART ...]

PART is table (the rows of the README), peers, memory, growth or fit; all by default. Everything is
measured in turn, several times over, with a plain forward of the network in every turn: medians of
the ratios to it, and their quartiles. Each way runs twice a turn, and the second run counts. The
plain forward runs in a process of its own, where bayesify has not been at work: it raises glibc's
thresholds, by which plain forwards of large batches become faster too; `plain_here_ms` is how long
they take beside it. `predict` is the whole public call, with the strategy that it
chose for itself; it is warm, so that taping and measuring, once for each shape, are not counted but
stated. Beside it stands `bnn.strategy = "compiled"`, which it does not choose by itself, as
compiling takes seconds to minutes for each shape: these are not counted but stated too. Networks
have random weights: they do not change the cost. Writes benchmarks/results/speed.json part by part,
and prints Markdown; --table prints that of an earlier run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify
from bayesify import ABNN, BayesianModel
from bayesify.batches import as_inputs
from bayesify.zoo import CifarResNet

FILE = Path(__file__).parent / "results" / "speed.json"
DRAWS = 12
BATCHES = (1, 8, 128)
LAST_BLOCK = "layer3.2.*"
EVERY = 1.0
TWO_BLOCKS = ["blocks.10.*", "blocks.11.*", "norm.*"]
# Name, network, image size, which norms are random, and by batch size what we are out to reach.
ROWS: list[tuple[str, str, int, Any, dict[int, float]]] = [
    ("ResNet-20, every norm random", "resnet20", 32, EVERY, {1: 4, 8: 6, 128: 6}),
    ("ResNet-20, last block random", "resnet20", 32, "layer3.2.*", {1: 1.5, 8: 1.3, 128: 1.2}),
    ("ResNet-50 (224), every norm", "resnet50", 224, EVERY, {1: 10, 8: 9}),
    ("ResNet-50 (224), last block", "resnet50", 224, "layer4.2.*", {1: 1.4, 8: 1.4}),
    ("ViT-S/16 (224), last two blocks", "vit_small_patch16_224", 224, TWO_BLOCKS, {1: 1.8, 8: 2.4}),
]


def build(name: str) -> nn.Module:
    if name.startswith("resnet") and (int(name[6:]) - 2) % 6 == 0 and name != "resnet50":
        network: nn.Module = CifarResNet((int(name[6:]) - 2) // 6)
    else:
        import timm

        network = timm.create_model(name)
    return network.eval()


def bayesian(network: nn.Module, x: Tensor, where: Any, draws: int = DRAWS) -> BayesianModel:
    return bayesify.convert(
        network, ABNN(members=3 if draws % 3 == 0 else 1, draws=draws), where=where, example=x[:1]
    )


class Elsewhere:
    """A plain forward in a process of its own."""

    def __init__(self, name: str, batch: int, size: int) -> None:
        code = f"import speed; speed.serve({name!r}, {batch}, {size})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.requests: Any = self.process.stdin
        self.answers: Any = self.process.stdout

    def __call__(self) -> float:
        """Seconds of a forward."""
        time.sleep(0.005)  # threads of this process go on spinning for a while
        self.requests.write("\n")
        return float(self.answers.readline())

    def close(self) -> None:
        self.process.communicate()


def serve(name: str, batch: int, size: int) -> None:
    """Runs a forward for each line that comes in, and says how long it took."""
    network, x = build(name), torch.randn(batch, 3, size, size)
    with torch.no_grad():
        network(x)
        for _ in sys.stdin:
            print(timed(lambda: network(x)), flush=True)


def timed(way: Callable[[], object]) -> float:
    """Seconds of the second of two runs."""
    way()
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


def in_turn(
    ways: dict[str, Callable[[], object]], plain: Elsewhere, seconds: float = 24.0
) -> dict[str, Any]:
    """Runs all ways in turn until time is up, and compares each turn with its plain forward."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    base: list[float] = []
    with torch.no_grad():
        for way in ways.values():
            way()
        started = time.monotonic()
        while len(base) < 3 or (time.monotonic() - started < seconds and len(base) < 60):
            base.append(plain())
            time.sleep(0.005)
            for name, way in ways.items():
                times[name].append(timed(way))
    plain.close()
    here = times.pop("plain")
    found: dict[str, Any] = {
        "plain_ms": 1e3 * statistics.median(base),
        "plain_here_ms": 1e3 * statistics.median(here),
        "turns": len(base),
    }
    for name, own in times.items():
        ratios = [mine / one for mine, one in zip(own, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = {"ratio": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
    return found


def predicting(bnn: BayesianModel, x: Tensor) -> tuple[Callable[[], object], dict[str, Any]]:
    """A warm `predict`, and what the first call cost and chose."""
    started = time.perf_counter()
    bnn.predict(x)
    first = time.perf_counter() - started
    with torch.no_grad():
        drawn = bnn.posterior.draws(0, range(bnn.method.draws))
        size = bnn.runner.batch_size(drawn, as_inputs(x[:1]), examples=len(x))
        way = bnn.runner.way(drawn, as_inputs(x[:size]))
    chosen = {"strategy": way.strategy, "chunk": way.chunk, "part": min(size, len(x))}
    return lambda: bnn.predict(x), {"first_call_s": round(first, 2), **chosen}


def table() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for title, name, size, where, goals in ROWS:
        network = build(name)
        for batch, goal in goals.items():
            x = torch.randn(batch, 3, size, size)
            bnn = bayesian(network, x, where)
            predict, chosen = predicting(bnn, x)
            looped = bayesian(network, x, where)
            looped.strategy = "looped"
            compiled = bayesian(network, x, where)
            compiled.strategy = "compiled"
            predict_compiled, first = predicting(compiled, x)
            found = in_turn(
                {
                    "plain": lambda network=network, x=x: network(x),
                    "predict": predict,
                    "compiled": predict_compiled,
                    "loop": lambda looped=looped, x=x: looped.predict(x),
                },
                Elsewhere(name, batch, size),
            )
            found["compiled"] |= first
            one_by_one = looped.predict(x).probs
            differences = [
                (each.predict(x).probs - one_by_one).abs().max().item() for each in (bnn, compiled)
            ]
            results[f"{title} | batch {batch}"] = {
                "goal": goal, **found, **chosen, "difference_from_loop": max(differences)
            }  # fmt: skip
            print(f"{title}, batch {batch}: {results[f'{title} | batch {batch}']}", flush=True)
    return results


def peers() -> dict[str, Any]:
    results = {}
    for batch in BATCHES:
        x = torch.randn(batch, 3, 32, 32)
        network = build("resnet20")
        ways: dict[str, Callable[[], object]] = {"plain": lambda network=network, x=x: network(x)}
        ways["bayesify, every norm"], _ = predicting(bayesian(network, x, EVERY), x)
        ways["bayesify, last block"], _ = predicting(bayesian(network, x, "layer3.2.*"), x)
        for name, make in (
            ("deep ensemble of 12", ensemble),
            ("torch-uncertainty ABNN", torch_uncertainty_abnn),
            ("bayesian-torch, MOPED", bayesian_torch_moped),
            ("laplace-torch, last layer, sampled", laplace_last_layer),
            ("laplace-torch, last layer, closed form", laplace_closed_form),
            ("a loop written by hand", loop_by_hand),
        ):
            ways[name] = make(build("resnet20"), x)
        results[f"batch {batch}"] = in_turn(ways, Elsewhere("resnet20", batch, 32), seconds=80)
        print(f"batch {batch}: {results[f'batch {batch}']}", flush=True)
    return results


def ensemble(network: nn.Module, x: Tensor) -> Callable[[], object]:
    members = [network, *(build("resnet20") for _ in range(DRAWS - 1))]
    return lambda: torch.stack([member(x).softmax(1) for member in members]).mean(0)


def torch_uncertainty_abnn(network: nn.Module, x: Tensor) -> Callable[[], object]:
    from torch_uncertainty.post_processing import abnn

    theirs = abnn.ABNN(
        num_classes=10, random_prior=1.0, alpha=0.1, num_models=3, num_samples=4, base_lr=1e-3,
        device="cpu", max_epochs=1, use_original_model=False, model=network,
    )  # fmt: skip
    data = TensorDataset(torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))
    with torch.enable_grad():
        theirs.fit(DataLoader(data, 8))
    theirs.eval()
    return lambda: theirs(x)


def bayesian_torch_moped(network: nn.Module, x: Tensor) -> Callable[[], object]:
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn

    settings = {
        "prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0, "type": "Reparameterization",
        "moped_enable": True, "moped_delta": 0.1,
    }  # fmt: skip
    dnn_to_bnn(network, settings)
    network.eval()
    return lambda: torch.stack([network(x).softmax(1) for _ in range(DRAWS)]).mean(0)


def laplace_last_layer(network: nn.Module, x: Tensor) -> Callable[[], object]:
    fitted = fitted_laplace(network)
    return lambda: fitted(x, pred_type="nn", link_approx="mc", n_samples=DRAWS)


def laplace_closed_form(network: nn.Module, x: Tensor) -> Callable[[], object]:
    fitted = fitted_laplace(network)
    return lambda: fitted(x, pred_type="glm", link_approx="probit")


def fitted_laplace(network: nn.Module) -> Any:
    from laplace import Laplace

    data = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(10, (256,)))
    with torch.enable_grad():
        fitted = Laplace(network, "classification", subset_of_weights="last_layer")
        fitted.fit(DataLoader(data, 64))
    return fitted


def loop_by_hand(network: nn.Module, x: Tensor) -> Callable[[], object]:
    """ABNN as one would write it: noise on every norm's scale, and a forward, for each draw."""
    scales = [m.weight for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    means = [scale.detach().clone() for scale in scales]

    def run() -> Tensor:
        total = torch.zeros(())
        for _ in range(DRAWS):
            for scale, mean in zip(scales, means, strict=True):
                scale.copy_(mean * (1 + 0.1 * torch.randn_like(mean)))
            total = total + network(x).softmax(1)
        return total / DRAWS

    return run


def memory() -> dict[str, Any]:
    """Peak memory of a process: `predict` with its default budget, against a plain forward.

    Medians over five processes each; of ResNet-50, where it hardly differs, one.
    """
    results = {}
    for name, size, batches, times in (
        ("resnet20", 32, (64, 256), 5),
        ("resnet50", 224, (64,), 1),
    ):
        for batch in batches:
            plain, *rest = (
                statistics.median(_peak(name, size, batch, draws) for _ in range(times))
                for draws in (0, 12, 24)
            )
            results[f"{name}, batch {batch}"] = {
                "plain_MB": round(plain, 1),
                **{
                    f"{d} draws": round(mb / plain, 2) for d, mb in zip((12, 24), rest, strict=True)
                },
            }
            print(name, batch, results[f"{name}, batch {batch}"], flush=True)
    return results


def _peak(*asked: object) -> float:
    """What `memory_of` says in a process of its own."""
    code = f"import speed; print(speed.memory_of{asked})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, check=True
    )
    return float(run.stdout)


def memory_of(name: str, size: int, batch: int, draws: int) -> float:
    """Megabytes that this process took at most for a prediction, above what it had before.

    No draws: a plain forward. Code is loaded before, by a plain forward of one example and a
    prediction of a small network, which leave hardly any memory behind to be used again.
    """

    def most() -> float:
        # Not getrusage's: that begins with what the process had that started this one.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1e3

    network, x = build(name), torch.randn(batch, 3, size, size)
    small = torch.randn(2, 3, 8, 8)
    bayesian(build("resnet8"), small, EVERY).predict(small)
    run: Callable[[Tensor], object] = network
    if draws:
        run = bayesian(network, x, EVERY, draws).predict
    with torch.no_grad():
        network(x[:1])
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
        before = most()
        run(x)
    return most() - before


def growth() -> dict[str, Any]:
    """Cost against draws, batch, network and image size, and the slope in log-log."""
    results = {}

    def measure(title: str, points: dict[int, tuple[str, int, int, int]]) -> None:
        costs = {}
        for at, (name, size, batch, draws) in points.items():
            network, x = build(name), torch.randn(batch, 3, size, size)
            predict, chosen = predicting(bayesian(network, x, EVERY, draws), x)
            found = in_turn(
                {"plain": lambda network=network, x=x: network(x), "predict": predict},
                Elsewhere(name, batch, size),
                seconds=8,
            )
            predicted = found.pop("predict")
            costs[at] = {**found, **predicted, **chosen}
        ends = [costs[at]["plain_ms"] * costs[at]["ratio"] for at in (min(points), max(points))]
        slope = statistics.linear_regression(
            [torch.tensor(float(at)).log().item() for at in (min(points), max(points))],
            [torch.tensor(end).log().item() for end in ends],
        ).slope
        results[title] = {"slope": round(slope, 2), "points": costs}
        print(title, results[title], flush=True)

    measure(
        "draws (ResNet-20, batch 8)", {s: ("resnet20", 32, 8, s) for s in (1, 3, 6, 12, 24, 48, 63)}
    )
    measure(
        "batch (ResNet-20, 12 draws)", {b: ("resnet20", 32, b, 12) for b in (1, 4, 16, 64, 256)}
    )
    measure("depth (batch 8)", {d: (f"resnet{d}", 32, 8, 12) for d in (20, 32, 44, 56)})
    measure(
        "image side (ResNet-20, batch 8)", {s: ("resnet20", s, 8, 12) for s in (16, 32, 64, 128)}
    )
    return results


def fit(examples: int = 2048, epochs: int = 4) -> dict[str, Any]:
    """Seconds of a fit's epoch, against one of plain training of all weights in the same turn.

    All that a fit does besides is in it: validation, and computing the features that are cached.
    """
    images, labels = torch.randn(examples, 3, 32, 32), torch.randint(10, (examples,))
    held = DataLoader(TensorDataset(images[:64], labels[:64]), 64)
    loader = DataLoader(TensorDataset(images, labels), 128, shuffle=True)
    rows: list[tuple[str, Any, int, bool]] = [
        ("every norm", EVERY, 1, False),
        ("last block", LAST_BLOCK, 1, False),
        ("last block, cached", LAST_BLOCK, 1, True),
        ("last block, 3 members", LAST_BLOCK, 3, False),
        ("last block, 3 members, cached", LAST_BLOCK, 3, True),
    ]
    results: dict[str, Any] = {
        title: {"seconds": [], "plain": [], "ratios": []} for title, *_ in rows
    }
    for _ in range(3):
        plain = plain_epoch(build("resnet20"), loader)
        for title, where, members, cache in rows:
            method = ABNN(members=members, draws=4 * members)
            bnn = bayesify.convert(build("resnet20"), method, where=where, example=images[:1])
            settings: dict[str, Any] = {
                "validations": 1, "temper": False, "progress": False, "cache": cache
            }  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", bayesify.BayesifyWarning)  # random labels
                started = time.perf_counter()
                result = bnn.fit(loader, epochs=epochs, validation=held, **settings)
                seconds = (time.perf_counter() - started) / epochs
            row = results[title]
            row["cache"] = result.cache
            row["seconds"].append(round(seconds, 2))
            row["plain"].append(round(plain, 2))
            row["ratios"].append(round(seconds / plain, 3))
    for title, row in results.items():
        row["ratio"] = statistics.median(row["ratios"])
        print("fit", title, row, flush=True)
    return results


def plain_epoch(network: nn.Module, loader: DataLoader[Any]) -> float:
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    started = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return time.perf_counter() - started


def markdown(results: dict[str, Any]) -> str:
    lines = ["| 12 draws, as multiples of one plain forward | batch 1 | batch 8 | batch 128 |"]
    lines.append("|---|---:|---:|---:|")
    for title, _, _, _, goals in ROWS:
        rows = {
            batch: results.get("table", {}).get(f"{title} | batch {batch}") for batch in BATCHES
        }
        cells = [
            f"{r['predict']['ratio']:.1f} ({goals[b]:g})" if r else "-" for b, r in rows.items()
        ]
        lines.append(f"| {title} (goal) | {' | '.join(cells)} |")
        cells = [f"{r['compiled']['ratio']:.1f}" if r else "-" for r in rows.values()]
        lines.append(f"| the same, compiled | {' | '.join(cells)} |")
    found = results.get("peers", {})
    for name in found.get("batch 1", {}):
        if name not in ("plain_ms", "plain_here_ms", "turns") and not name.startswith("bayesify"):
            cells = [f"{found[f'batch {b}'][name]['ratio']:.1f}" for b in BATCHES]
            lines.append(f"| ResNet-20, {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


PARTS = {"table": table, "peers": peers, "memory": memory, "growth": growth, "fit": fit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--table", action="store_true", help="print the table of an earlier run")
    arguments = parser.parse_args()
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    for part in [] if arguments.table else arguments.parts or list(PARTS):
        torch.manual_seed(0)
        machine = {
            "command": f"python benchmarks/speed.py {part}",
            "torch": torch.__version__,
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "load": os.getloadavg()[0],
        }
        results[part] = PARTS[part]()
        results["runs"] = results.get("runs", {}) | {part: machine}
        FILE.write_text(json.dumps(results, indent=2) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
