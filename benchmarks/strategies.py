"""What each strategy saves and costs: the tables of docs/strategies/*.md.

    python benchmarks/strategies.py [--only activation_checkpointing] [--save] [--no-times]
    python benchmarks/strategies.py --pages      # writes the newest figures into the pages; measures nothing

Counted, on fake tensors, for ResNet-50 (16 images of 224 pixels) and BERT-base (8 × 512 tokens, dropout 0): the bytes
that stand between forward and backward, the most bytes at once in a step (weights, gradients, optimizer states and
activations), and the FLOPs of a step. Measured, on the device at hand and with smaller models where that is a CPU: the
time of a step. Strategy and plain training (float32, AdamW) take turns; the figure is the median of their ratios.
"""

from __future__ import annotations

import argparse
import csv
import gc
import platform
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu import Block, Images, Words, save, timed
from benchmarks.overhead import ROOT, trainer_block
from fasttrain import ConfigError
from fasttrain.nn.activations import LiveStorages

RESULTS = ROOT / "benchmarks" / "results" / "strategies.csv"
PAGES = ROOT / "docs" / "strategies"
QUIET: dict[str, Any] = {"run": {"dir": None}, "log": {"every": 10**9}, "steps": 10**6}

# By slot: what a row is called, and what it sets beside plain training; by model where that differs.
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "precision": {name: {"precision": name} for name in ("bf16", "fp16", "bf16_true")},
    "memory_format": {"channels_last": {"memory_format": "channels_last"}},
    "adapters": {
        "lora": {"adapters": "lora"},
        "qlora": {"adapters": "qlora"},
        "freeze, all but the head": {
            "resnet50": {"adapters": {"name": "freeze", "train": ["fc"]}},
            "bert_base": {"adapters": {"name": "freeze", "train": ["head"]}},
        },
    },
    "batch_norm": {"frozen": {"batch_norm": "frozen"}},
    "activation_checkpointing": {
        "full": {"activation_checkpointing": "full"},
        "full, every: 2": {"activation_checkpointing": {"name": "full", "every": 2}},
        "full, every: 4": {"activation_checkpointing": {"name": "full", "every": 4}},
        "selective": {"activation_checkpointing": "selective"},
        "budget: 0.5 (and compile)": {"activation_checkpointing": "budget", "compile": "blocks"},
        "bf16": {"precision": "bf16"},
        "bf16, full": {"precision": "bf16", "activation_checkpointing": "full"},
        "bf16, selective": {"precision": "bf16", "activation_checkpointing": "selective"},
    },
    "compile": {name: {"compile": name} for name in ("blocks", "model")},
    "accumulation": {
        "num: 2": {"accumulation": {"name": "microbatches", "num": 2}},
        "num: 4": {"accumulation": {"name": "microbatches", "num": 4}},
    },
    "optimizer": {
        "sgd": {"optimizer": "sgd"},
        "lamb": {"optimizer": "lamb"},
        "muon": {"optimizer": "muon"},
        "adamw_8bit": {"optimizer": "adamw_8bit"},
        "adafactor": {"optimizer": "adafactor"},
        "adamw, state_dtype: bf16": {"optimizer": {"name": "adamw", "state_dtype": "bf16"}},
        "adamw, in_backward": {"optimizer": {"name": "adamw", "in_backward": True}},
        "adamw, blocks recomputed": {"activation_checkpointing": "full"},
        "adamw, blocks recomputed, in_backward": {
            "activation_checkpointing": "full",
            "optimizer": {"name": "adamw", "in_backward": True},
        },
        "adamw, offload": {"optimizer": {"name": "adamw", "offload": True}},
    },
    "gradient_clipping": {name: {"gradient_clipping": name} for name in ("norm", "value", "adaptive")},
    "nonfinite": {name: {"nonfinite": name} for name in ("raise", "skip")},
    "weight_averaging": {
        "ema": {"weight_averaging": "ema"},
        "swa": {"weight_averaging": {"name": "swa", "start": 0}},
    },
}
# What has no rows, with the reason.
WITHOUT_ROWS = {
    "activation_offload": "on a CPU the host is the device; its tests count on fake CUDA tensors",
    "float8": "emulated where there is no such hardware, which says nothing of its speed",
    "data_parallel": "one process has nobody to talk to",
    "schedule": "sets a number",
}
# What fake tensors on the CPU do not show, with the reason; by slot, or slot and row.
NOT_COUNTED = {
    "compile": "the compiler decides what is kept",
    "activation_checkpointing.budget: 0.5 (and compile)": "the compiler decides what is kept",
    "optimizer.adamw, offload": "on a CPU the host is the device",
    "optimizer.adamw_8bit": "torchao looks at numbers, which fake tensors have not",
}

# What is counted on real tensors, as peft and bitsandbytes work on no others.
REAL = {"adapters.lora", "adapters.qlora"}

# Whose products torch's counter does not know.
NO_FLOPS = {"adapters.qlora"}


def settings_of(slot: str, label: str, model: str) -> dict[str, Any]:
    """What a row sets for a model."""
    settings = ROWS[slot][label] if slot else {}
    return settings.get(model, settings)


class CountedImages(Images):
    """ResNet-50 as it is counted."""

    samples = 16

    def place(self, model: Any) -> Any:
        """On the CPU already; fake weights cannot be moved."""
        return model


class CountedWords(Words):
    """BERT-base as it is counted."""

    samples = 8

    def place(self, model: Any) -> Any:
        """On the CPU already; fake weights cannot be moved."""
        return model


class TimedImages(Images):
    """A ResNet-50 that a CPU trains in a fraction of a second a step."""

    samples, pixels, classes = 8, 64, 100


class TimedWords(Words):
    """A BERT that a CPU trains in a fraction of a second a step."""

    samples, tokens = 8, 128
    sizes = {"vocabulary": 8192, "width": 256, "layers": 4, "heads": 4, "feedforward": 1024}


COUNTED: dict[str, type[Any]] = {"resnet50": CountedImages, "bert_base": CountedWords}
TIMED: dict[str, type[Any]] = {"resnet50": TimedImages, "bert_base": TimedWords}


def counted(kind: type[Any], settings: dict[str, Any], real: bool = False) -> dict[str, Any]:
    """Bytes kept by a forward, most bytes of a step, and FLOPs; in MiB and GFLOP."""
    fake = nullcontext() if real else FakeTensorMode()
    with fake, LiveStorages() as live:
        trainer = kind(batch_size=kind.samples, device="cpu", **QUIET, **settings)
        batches = trainer.feed.training(trainer.task, trainer.plan)
        trainer.train_step(next(batches))  # now the optimizer has its states
        batch = next(batches)
        first = trainer.plan.split(trainer.task, batch)[0]
        gc.collect()
        before = live.bytes()
        with torch.enable_grad(), trainer.plan.forward():
            loss = trainer.compute_loss(first)
        gc.collect()
        kept = live.bytes() - before
        del loss
        live.peak = live.bytes()
        trainer.train_step(batch)
        peak = live.peak
    with fake, FlopCounterMode(display=False) as flops:  # apart: it holds on to what blocks recompute
        trainer.train_step(batch)
    return {
        "kept_mib": round(kept / 2**20, 1),
        "peak_mib": round(peak / 2**20, 1),
        "gflop": round(flops.get_total_flops() / 1e9, 2),
    }


def block_of(kind: type[Any], settings: dict[str, Any], device: torch.device) -> Block:
    """Steps of a trainer that has warmed up."""
    trainer = kind(batch_size=kind.samples, device=device.type, **QUIET, **settings)
    block = trainer_block(trainer)
    block(3)
    return block


def time_ratio(kind: type[Any], settings: dict[str, Any], device: torch.device, rounds: int) -> float:
    """Time of a step over that of plain training: the median over rounds in which the two take turns."""
    plain, other = block_of(kind, {}, device), block_of(kind, settings, device)
    steps, ratios = 2 if device.type == "cpu" else 15, []
    for turn in range(rounds):
        order = [("plain", plain), ("other", other)]
        times = {label: timed(block, steps, device) for label, block in (order if turn % 2 else reversed(order))}
        ratios.append(times["other"] / times["plain"])
    return round(statistics.median(ratios), 3)


def measure(
    slot: str, label: str, model: str, device: torch.device, rounds: int, counts: bool = True
) -> dict[str, Any]:
    """One row. `rounds=0`: no times; `counts=False`: nothing else."""
    settings = settings_of(slot, label, model)
    row: dict[str, Any] = {"slot": slot, "setting": label, "model": model}
    try:
        if counts and not {slot, f"{slot}.{label}"} & set(NOT_COUNTED):
            row |= counted(COUNTED[model], settings, f"{slot}.{label}" in REAL)
            if f"{slot}.{label}" in NO_FLOPS:
                del row["gflop"]
        if rounds:
            kind = (TIMED if device.type == "cpu" else COUNTED)[model]
            row["time"] = time_ratio(kind, settings, device, rounds) if slot else 1.0
    except ConfigError as error:
        row["refused"] = str(error)
    return row


# ---- pages

COLUMNS = ["date", "commit", "torch", "device", "slot", "setting", "model", "kept_mib", "peak_mib", "gflop", "time"]
COLUMNS += ["refused"]
BEGIN, END = "<!-- benchmarks/strategies.py -->\n", "<!-- end -->\n"


def newest(path: Path = RESULTS) -> dict[tuple[str, str, str], dict[str, str]]:
    """The last row of each slot, setting and model; a figure that it left out is that of the row before."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = (row["slot"], row["setting"], row["model"])
            found[key] = found.get(key, {}) | {name: value for name, value in row.items() if value}
    return found


def table(slot: str, rows: dict[tuple[str, str, str], dict[str, str]]) -> str:
    """The table of a page: figures of both models beside those of plain training."""
    lines = [
        "| | ResNet-50: kept | peak | FLOPs | time | BERT-base: kept | peak | FLOPs | time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    plain = {model: rows["", "plain", model] for model in COUNTED}
    for label in ["plain", *ROWS[slot]]:
        cells = []
        for model in COUNTED:
            row = rows.get(("" if label == "plain" else slot, label, model), {})
            if "refused" in row:
                cells += ["refused", "", "", ""]
                continue
            for key in ("kept_mib", "peak_mib"):
                own, of = row.get(key), float(plain[model][key])
                share = "" if label == "plain" or not own else f" ({float(own) / of:.0%})"
                cells.append(f"{float(own):,.0f} MiB{share}" if own else "")
            cells.append(f"{float(row['gflop']) / float(plain[model]['gflop']):.2f} ×" if "gflop" in row else "")
            cells.append(f"{float(row['time']):.2f} ×" if "time" in row else "")
        lines.append(f"| {label} |" + "".join(f" {cell} |" for cell in cells))
    device = next((row["device"] for (s, *_), row in rows.items() if s == slot and "time" in row), "")
    where = f"; time on {device} with smaller models" if device else ""
    lines += ["", f"Kept: from forward to backward. Peak: all of a step. Counted by `benchmarks/strategies.py`{where}."]
    reasons = {label: NOT_COUNTED.get(f"{slot}.{label}", NOT_COUNTED.get(slot)) for label in ROWS[slot]}
    lines += [f"Not counted: {label}, as {reason}." for label, reason in reasons.items() if reason is not None]
    return "\n".join(lines) + "\n"


def with_table(page: str, slot: str, rows: dict[tuple[str, str, str], dict[str, str]]) -> str:
    """A page with its table written anew between the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"docs/strategies/{slot}.md lacks the marks {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + table(slot, rows) + END + after


def write_pages() -> None:
    """Put the newest figures into all pages."""
    rows = newest()
    for slot in ROWS:
        path = PAGES / f"{slot}.md"
        path.write_text(with_table(path.read_text(), slot, rows))


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and append to the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "xpu"])
    parser.add_argument("--only", nargs="*", choices=[*ROWS, *COUNTED], default=[], help="slots, or models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-times", action="store_true", help="count alone")
    parser.add_argument("--no-counts", action="store_true", help="take times alone")
    parser.add_argument("--pages", action="store_true", help="write the newest figures into the pages")
    parser.add_argument("--save", nargs="?", type=Path, const=RESULTS, help=f"append to {RESULTS.relative_to(ROOT)}")
    asked = parser.parse_args(arguments)
    if asked.pages:
        write_pages()
        return
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {platform.machine()} CPU"
    torch.set_num_threads(1 if asked.device == "cpu" else torch.get_num_threads())
    models = [model for model in COUNTED if model in asked.only] or list(COUNTED)
    slots = [slot for slot in ROWS if slot in asked.only] or list(ROWS)
    for model in models:
        for slot, labels in {"": {"plain": {}}, **{slot: ROWS[slot] for slot in slots}}.items():
            for label in labels:
                row = measure(slot, label, model, device, 0 if asked.no_times else asked.rounds, not asked.no_counts)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
                if asked.save is not None:  # each as it comes: all of them take a while
                    save([row], name, asked.save, COLUMNS)
                torch.compiler.reset()
                gc.collect()


if __name__ == "__main__":
    main()
