"""How long a start takes with nothing compiled, and with the cache that an earlier start left.

    python benchmarks/compile.py [--rounds 3] [--only resnet18] [--save]

Each start is a fresh process that trains for two steps. A round is a cold start, with an empty folder, and a warm one with
what it left. `compile_s` is the time inside torch.compile, forward and backward; `first_step_s` goes from the beginning of
the process to the end of the first step. The ratio is cold against warm, the median over rounds. Models are small on a CPU,
where the C++ compiler takes most of a cold start.
"""

from __future__ import annotations

import time

BEGAN = time.time()  # before torch is imported

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu import Images, Words, save  # noqa: E402
from benchmarks.overhead import ROOT  # noqa: E402
from fasttrain.trainer.account import compile_seconds  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "compile.csv"
COLUMNS = ["date", "commit", "torch", "device", "model", "compile", "cold_s", "warm_s", "ratio", "lowest_ratio"]
COLUMNS += ["cold_first_step_s", "warm_first_step_s", "graphs", "misses", "rounds"]


class ResNet18(Images):
    """ResNet-18 on images of 64 pixels."""

    samples, pixels, classes, model_name = 4, 64, 10, "resnet18"


class BertMini(Words):
    """A BERT of four layers."""

    samples, tokens = 4, 64
    sizes = {"vocabulary": 512, "width": 128, "layers": 4, "heads": 2, "feedforward": 512}


class ViT(Images):
    """torchvision's vision transformer, four layers of it, on images of 64 pixels."""

    samples, pixels, classes = 4, 64, 10

    def build_model(self) -> nn.Module:
        """The model."""
        from torchvision.models import VisionTransformer

        return VisionTransformer(
            image_size=self.pixels,
            patch_size=16,
            num_layers=4,
            num_heads=4,
            hidden_dim=128,
            mlp_dim=512,
            num_classes=10,
        )


MODELS = {"resnet18": ResNet18, "bert4": BertMini, "vit4": ViT}


def start(model: str, compile: str, folder: str, device: str) -> dict[str, Any]:
    """What this process, a fresh one, takes for two steps."""
    from torch._dynamo.utils import counters

    done: list[float] = []

    class Timed(MODELS[model]):
        def train_step(self, batch: Any) -> Any:
            info = super().train_step(batch)
            info.loss.item()
            done.append(time.time() - BEGAN)
            return info

    kind: Any = Timed
    given = {"name": compile, "cache": folder, "reference_steps": 0}  # nothing but the steps themselves
    kind(
        batch_size=kind.samples,
        steps=2,
        device=device,
        compile=given,
        run={"dir": None},
    ).fit()
    of_aot = counters["aot_autograd"]
    return {
        "compile_s": compile_seconds(),
        "first_step_s": done[0],
        "graphs": of_aot["ok"],
        "misses": of_aot["autograd_cache_miss"] + of_aot["autograd_cache_bypass"],
    }


def fresh(model: str, compile: str, folder: Path, device: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--start", model, compile, str(folder), "--device", device]
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, compile: str, device: str, rounds: int) -> dict[str, Any]:
    """A row: cold against warm."""
    pairs = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="compile") as folder:
            cold, warm = (fresh(model, compile, Path(folder, "cache"), device) for _ in range(2))
        pairs.append((cold, warm))
    ratios = [cold["compile_s"] / warm["compile_s"] for cold, warm in pairs]

    def middle(which: int, figure: str) -> float:
        return round(statistics.median(pair[which][figure] for pair in pairs), 2)

    return {
        "model": model,
        "compile": compile,
        "cold_s": middle(0, "compile_s"),
        "warm_s": middle(1, "compile_s"),
        "ratio": round(statistics.median(ratios), 1),
        "lowest_ratio": round(min(ratios), 1),
        "cold_first_step_s": middle(0, "first_step_s"),
        "warm_first_step_s": middle(1, "first_step_s"),
        "graphs": pairs[0][1]["graphs"],
        "misses": max(warm["misses"] for _, warm in pairs),
        "rounds": rounds,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and append to the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "xpu"])
    parser.add_argument("--only", nargs="*", choices=[*MODELS, "blocks", "model"], default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, help=f"append to {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--start", nargs=3, metavar=("MODEL", "COMPILE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    name = f"a {platform.machine()} CPU"
    if asked.device == "cpu":
        torch.set_num_threads(1)
    else:
        name = torch.get_device_module(asked.device).get_device_name()
    if asked.start:
        model, compile, folder = asked.start
        print(json.dumps(start(model, compile, folder, asked.device)))
        return
    for model in [name for name in MODELS if name in asked.only] or list(MODELS):
        for compile in [name for name in ("blocks", "model") if name in asked.only] or ["blocks", "model"]:
            row = measure(model, compile, asked.device, asked.rounds)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if asked.save is not None:  # each as it comes: all of them take a while
                save([row], name, asked.save, COLUMNS)


if __name__ == "__main__":
    main()
