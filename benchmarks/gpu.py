"""Step time and peak memory on one GPU: ResNet-50 at 224 pixels and BERT-base at 512 tokens, on synthetic data.

    python benchmarks/gpu.py [--save] [--only resnet50]
    python benchmarks/gpu.py --device cpu --tiny          # the same code on small models, to see that it runs

Runs unattended, in less than eight minutes on a modern GPU (`--minutes` bounds it: a setting is left out, and said to be,
where the longest one so far would not fit any more). Compiled code goes to a folder of this call, so that `compile_s` is a
first start's, but for what earlier settings left there: all of it in the one named `warm`. Each
setting trains through the Trainer, and where plain PyTorch is a few lines also in a hand-written loop (`flat`); the two
take turns on the same data, and `ratio` is the median of Trainer over flat. Peak memory is what tensors held.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.overhead import ROOT, trainer_block
from benchmarks.saved import commit
from fasttrain import ConfigError, Data, Trainer
from fasttrain.core.float32 import set_fp32_precision
from fasttrain.data.text import IGNORED
from fasttrain.models.bert import BertForMaskedLM
from fasttrain.models.bert_config import BertConfig
from fasttrain.models.resnet import build_resnet
from recipes.flat.bert import groups

RESULTS = ROOT / "benchmarks" / "results" / "gpu.csv"
Block = Callable[[int], object]

# In the order of what one wants to know first: the time may be up before the last. Those that inductor compiles take
# longest to begin, and share what it has made.
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16+compile": {"precision": "bf16", "compile": "blocks"},
    "bf16+compile, warm": {"precision": "bf16", "compile": "blocks"},
    "bf16+compile+graphs": {"precision": "bf16", "compile": {"name": "blocks", "mode": "reduce-overhead"}},
    "bf16+channels_last": {"precision": "bf16", "memory_format": "channels_last"},
    "bf16+checkpointing": {"precision": "bf16", "activation_checkpointing": "full"},
    "bf16_true": {"precision": "bf16_true"},
    "bf16+float8+compile": {"precision": "bf16", "float8": "tensorwise", "compile": "blocks"},
    "bf16+selective": {"precision": "bf16", "activation_checkpointing": "selective"},
    "bf16+optimizer_offload": {"precision": "bf16", "optimizer": {"offload": True}},
    "bf16+activation_offload": {"precision": "bf16", "activation_offload": "cpu"},
    "bf16+in_backward": {"precision": "bf16", "optimizer": {"in_backward": True}},
    "bf16+lora": {"precision": "bf16", "adapters": {"name": "lora", "rank": 16}},
    "bf16+ema": {"precision": "bf16", "weight_averaging": "ema"},
    "tf32": {"precision": "tf32"},
    "fp16": {"precision": "fp16"},
    "bf16+channels_last+compile": {"precision": "bf16", "memory_format": "channels_last", "compile": "blocks"},
    "bf16+budget+compile": {"precision": "bf16", "activation_checkpointing": "budget", "compile": "blocks"},
    "bf16+adamw_8bit": {"precision": "bf16", "optimizer": {"name": "adamw_8bit"}},
    "bf16+muon": {"precision": "bf16", "optimizer": {"name": "muon"}},
    "bf16+compile, loss": {"precision": "bf16", "compile": {"name": "blocks", "loss": True}},
    "bf16+compile, optimizer": {"precision": "bf16", "compile": {"name": "blocks", "optimizer": True}},
    "bf16+muon+compile, optimizer": {
        "precision": "bf16",
        "optimizer": {"name": "muon"},
        "compile": {"name": "blocks", "optimizer": True},
    },
    "bf16+compile=model": {"precision": "bf16", "compile": "model"},
}
MASKED = 0.15
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 1e-4}


class Images(Trainer):
    """ResNet-50 on random images."""

    samples, pixels, classes, model_name = 64, 224, 1000, "resnet50"

    def build_data(self) -> Data:
        """Twice a batch, so that each step takes other images."""
        n = 2 * self.samples
        return Data(train=(torch.randn(n, 3, self.pixels, self.pixels), torch.randint(self.classes, (n,))))

    def build_model(self) -> nn.Module:
        """The model."""
        return build_resnet(self.model_name, num_classes=self.classes)

    def loss(self, output: Any, batch: Any) -> Any:
        """Mean cross-entropy."""
        return F.cross_entropy(output, batch[1])


class Words(Trainer):
    """BERT-base on random tokens, of which some are hidden."""

    samples, tokens = 16, 512
    sizes: dict[str, int] = {}

    def build_data(self) -> Data:
        """Twice a batch."""
        n, hidden, vocabulary = 2 * self.samples, int(self.tokens * MASKED), self.bert().vocabulary
        return Data(
            train={
                "tokens": torch.randint(vocabulary, (n, self.tokens)),
                "positions": torch.rand(n, self.tokens).argsort(1)[:, :hidden].contiguous(),
                "labels": torch.randint(vocabulary, (n, hidden)),
            }
        )

    def bert(self) -> BertConfig:
        """Its sizes; the vocabulary is a multiple of 64."""
        return BertConfig(**{"vocabulary": 30528, "positions": self.tokens, "dropout": 0.0, **self.sizes})

    def build_model(self) -> nn.Module:
        """The model."""
        return BertForMaskedLM(self.bert())

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """Tokens, and where scores are wanted."""
        return batch["tokens"], None, None, batch["positions"]

    def loss(self, output: Any, batch: Any) -> Any:
        """Mean cross-entropy over hidden tokens."""
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


class TinyImages(Images):
    """Small enough for a CPU."""

    samples, pixels, classes, model_name = 2, 32, 10, "resnet18"


class TinyWords(Words):
    """Small enough for a CPU."""

    samples, tokens = 2, 32
    sizes = {"vocabulary": 256, "width": 32, "layers": 2, "heads": 2, "feedforward": 64}


MODELS: dict[str, tuple[type[Any], type[Any]]] = {"resnet50": (Images, TinyImages), "bert_base": (Words, TinyWords)}


def flat_block(trainer: Any, setting: str, device: torch.device) -> Block | None:
    """The same training by hand; `None` where that would be more than a few lines."""
    if setting not in ("fp32", "tf32", "bf16", "fp16"):
        return None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(setting)
    torch.manual_seed(0)
    model = trainer.build_model().to(device)
    optimizer = torch.optim.AdamW(groups(model, weight_decay=0.01), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device.type) if setting == "fp16" else None
    batches = endless(trainer.data.train, trainer.samples, device)

    def block(steps: int) -> None:
        for _ in range(steps):
            batch = next(batches)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                loss = trainer.loss(model(*trainer.inputs(batch)), batch)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=True)

    return block


def endless(data: Any, size: int, device: torch.device) -> Iterator[Any]:
    """Batches on the device, copied as a hand-written loop would: pinned, and without waiting."""

    def part(tensor: torch.Tensor, first: int) -> torch.Tensor:
        piece = tensor[first : first + size]
        return piece.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else piece

    while True:
        for first in (0, size):
            if isinstance(data, dict):
                yield {name: part(tensor, first) for name, tensor in data.items()}
            else:
                yield tuple(part(tensor, first) for tensor in data)


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def timed(block: Block, steps: int, device: torch.device) -> float:
    """Seconds a step."""
    wait(device)
    began = time.perf_counter()
    block(steps)
    wait(device)
    return (time.perf_counter() - began) / steps


def measured(block: Block, device: torch.device, warm_up: int) -> int | None:
    """Warm up, then the peak bytes of two steps; `None` on a CPU."""
    block(warm_up)
    wait(device)
    if device.type == "cpu":
        return None
    torch.accelerator.reset_peak_memory_stats()
    block(2)
    wait(device)
    return torch.accelerator.max_memory_allocated()


def asked_of(setting: str, cache: Path) -> dict[str, Any]:
    """The settings of a trainer. What it compiles is kept in `cache`, and nothing is measured but the steps themselves."""
    asked = {**SETTINGS[setting], "optimizer": {**ADAMW, **SETTINGS[setting].get("optimizer", {})}}
    if "compile" in asked:
        given = asked["compile"]
        given = {"name": given} if isinstance(given, str) else given
        asked["compile"] = {**given, "cache": str(cache), "reference_steps": 0}
    return asked


def measure(
    kind: type[Any], name: str, setting: str, device: torch.device, steps: int, rounds: int, cache: Path
) -> dict[str, Any]:
    """One row: one model with one setting."""
    row: dict[str, Any] = {"model": name, "setting": setting, "batch": kind.samples}
    settings = {"log": {"every": 10**9}, "steps": 10**6, "run": {"dir": None}, "device": device.type}
    asked = asked_of(setting, cache)
    # What an earlier setting left in the process is none of this one's: TensorFloat-32, and graphs that count to a limit.
    set_fp32_precision("ieee")
    torch.compiler.reset()
    try:
        trainer = kind(batch_size=kind.samples, **settings, **asked)
    except ConfigError as error:
        return row | {"status": "refused", "reason": str(error)}
    try:
        block = trainer_block(trainer)
        peak = measured(block, device, warm_up=3)
        flat = flat_block(trainer, setting, device)
        if flat is not None:
            flat(3)
        times: dict[str, list[float]] = {"trainer": [], "flat": []}
        for turn in range(rounds):
            order = [("trainer", block), ("flat", flat)]
            for label, one in order if turn % 2 else reversed(order):
                if one is not None:
                    times[label].append(timed(one, steps, device))
    except torch.OutOfMemoryError:
        return row | {"status": "oom", "reason": "out of memory"}
    step_s = statistics.median(times["trainer"])
    row |= {"status": "done", "step_ms": round(step_s * 1e3, 3), "samples_per_s": round(kind.samples / step_s, 1)}
    row |= {"peak_mib": None if peak is None else round(peak / 2**20, 1)}
    if "compile" in asked:
        compiled = trainer.plan.summary()["compile"]
        row |= {"compile_s": round(compiled["seconds"], 2), "graphs": compiled["graphs"]}
        row |= {"graphs_cached": compiled["from_cache"], "breaks": len(compiled["breaks"])}
    if times["flat"]:
        row["flat_ms"] = round(statistics.median(times["flat"]) * 1e3, 3)
        row["ratio"] = round(statistics.median(t / f for t, f in zip(times["trainer"], times["flat"], strict=True)), 4)
    return row


COLUMNS = ["date", "commit", "torch", "device", "model", "setting", "batch", "status", "step_ms", "samples_per_s"]
COLUMNS += ["peak_mib", "flat_ms", "ratio", "compile_s", "graphs", "graphs_cached", "breaks", "reason"]


def save(rows: list[dict[str, Any]], device: str, path: Path, columns: list[str] = COLUMNS) -> None:
    """Append rows to the results, with the day, the commit, torch and the name of the device."""
    common = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "torch": torch.__version__,
        "device": device,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(common | row for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and append to the results where asked. 2: there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "xpu", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small models and few steps")
    parser.add_argument("--only", choices=[*MODELS, *SETTINGS], help="one model, or one setting")
    parser.add_argument("--minutes", type=float, default=7.5, help="begin nothing that would take longer")
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, help=f"append to {RESULTS.relative_to(ROOT)}")
    asked = parser.parse_args(arguments)
    if asked.device != "cpu" and not getattr(torch, asked.device).is_available():
        sys.stderr.write(
            f"benchmarks/gpu.py: torch {torch.__version__} sees no {asked.device} device here; run it on a machine with a "
            "GPU, or see that it runs with --device cpu --tiny.\n"
        )
        return 2
    device = torch.device(asked.device, 0) if asked.device != "cpu" else torch.device("cpu")
    steps, rounds = (1, 1) if asked.tiny else (15, 3)
    with tempfile.TemporaryDirectory(prefix="fasttrain-gpu-", ignore_cleanup_errors=True) as folder:
        rows = run(asked, device, steps, rounds, Path(folder))
    if asked.save is not None:
        save(rows, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, asked.save)
    return 0


def run(asked: Any, device: torch.device, steps: int, rounds: int, cache: Path) -> list[dict[str, Any]]:
    """All settings that are asked for, as long as there is time."""
    began, longest, rows = time.monotonic(), 0.0, []
    for setting in SETTINGS:
        for name, kinds in MODELS.items():
            if asked.only not in (None, name, setting):
                continue
            now = time.monotonic()
            if now - began + longest > asked.minutes * 60:
                row = {"model": name, "setting": setting, "status": "left out", "reason": "the time was up"}
            else:
                row = measure(kinds[asked.tiny], name, setting, device, steps, rounds, cache)
                gc.collect()
                if device.type != "cpu":
                    torch.accelerator.empty_cache()
                longest = max(longest, time.monotonic() - now)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
