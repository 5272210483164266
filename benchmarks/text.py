"""Real tokens a second of a training step, by how sequences of various lengths lie in a batch.

    python benchmarks/text.py [--rounds 5] [--steps 3] [--mix short,mixed,long] [--save]

Three mixes of real text: movie sentences (short), entries of a dictionary (mixed), long entries of it alone (long);
scripts/fetch_data movie gcide minilm gets them. One process trains a BERT of the shape of MiniLM (6 layers, width 384) to
sort texts into two classes, with frozen embeddings, as configs/bert_movie.yaml does; the ways take turns in rounds, on the
same sequences. `fixed` pads each batch to the longest of the whole set, `padded` to its own longest, `grouped` pads batches
of sequences about as long, `packed` fills rows of 256 tokens, `unpadded` has all in one row. Only tokens of the text count,
never padding. The figure is the median over rounds of tokens a second; the ratio is that to `fixed` in the same round, again
the median. On CUDA the precision is bf16, elsewhere float32.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.saved import ROOT, append
from fasttrain.core.batch import cut
from fasttrain.data.grouping import group_by_length
from fasttrain.data.text import (
    Layout,
    LayoutConfig,
    Sequences,
    encode,
    load_tokenizer,
    separate_sequences,
    special_ids,
)
from fasttrain.models.bert import BertForClassification
from fasttrain.models.bert_config import BertConfig
from recipes import sets

RESULTS = ROOT / "benchmarks" / "results" / "data_text.csv"
WAYS = ("fixed", "padded", "grouped", "packed", "unpadded")
LONGEST = 256
MINILM = {"width": 384, "layers": 6, "heads": 12, "feedforward": 1536}
# How many sequences a batch has: about 1,000 tokens in each mix on a CPU, 32 times as many on CUDA.
MIXES = {"short": 36, "mixed": 24, "long": 6}


def texts_of(mix: str) -> list[str]:
    """Texts of a mix, some thousands of them."""
    if mix == "short":
        return sets.movie_sentences(least=0.0)[0]
    entries = [" ".join(entry.split()) for entry in sets.gcide_entries()]
    return entries[::60] if mix == "mixed" else [entry for entry in entries[::4] if len(entry) > 500]


def sequences_of(mix: str) -> tuple[Sequences, dict[str, int], int]:
    """Token sequences of a mix, its special ids, and the size of the vocabulary."""
    tokenizer = load_tokenizer(sets.path_of("minilm"))
    special = special_ids(tokenizer)
    ids = (ids[: LONGEST - 2] for ids in encode(tokenizer, texts_of(mix)))
    tokens, ends = separate_sequences(ids, LONGEST, start=special["[CLS]"], separator=special["[SEP]"])
    return Sequences(ends, {"tokens": tokens}), special, tokenizer.get_vocab_size()


class Ways:
    """The batches of one mix in each way."""

    def __init__(self, mix: str, device: torch.device) -> None:
        data, special, vocabulary = sequences_of(mix)
        self.data, self.special, self.vocabulary, self.device = data, special, vocabulary, device
        self.batch_size = MIXES[mix] * (32 if device.type == "cuda" else 1)
        self.config = LayoutConfig(sequence_length=LONGEST)
        self.longest = int(data.lengths.max())
        generator = torch.Generator().manual_seed(0)
        self.shuffled = torch.randperm(len(data), generator=generator)
        self.grouped = group_by_length(self.shuffled, torch.as_tensor(data.lengths), self.batch_size, generator)

    def batch(self, way: str, number: int) -> tuple[dict[str, Any], int]:
        """A batch on the device, and the tokens of text in it."""
        order = self.grouped if way == "grouped" else self.shuffled
        first = number * self.batch_size % (len(order) - self.batch_size)
        first -= first % self.batch_size
        samples = [{**self.data[int(i)], "label": i % 2} for i in order[first : first + self.batch_size]]
        kind = way if way in ("packed", "unpadded") else "padded"
        # All of the longest, so that no batch is cut to less.
        multiple = self.longest if way == "fixed" else self.config.multiple
        config = replace(self.config, layout=kind, multiple=multiple)
        layout = Layout(config, {"tokens": self.special["[PAD]"]})
        (whole,) = cut(layout.collate(samples), 1)
        laid = layout.lay_out(whole)
        tokens = sum(len(sample["tokens"]) for sample in samples)
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device), laid), tokens


def step(model: Any, optimizer: Any, batch: dict[str, Any]) -> None:
    """One step."""
    kind = batch["tokens"].device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        within, first = batch.get("boundaries"), batch.get("first")
        scores = model(batch["tokens"], batch.get("mask"), within=within, first=first)
        loss = torch.nn.functional.cross_entropy(scores.float(), batch["label"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(
    mix: str, rounds: int, steps: int, device: torch.device, shape: dict[str, int] = MINILM
) -> list[dict[str, Any]]:
    """A row a way: tokens a second, the ratio to `fixed`, and the share of a batch that is text."""
    ways = Ways(mix, device)
    torch.manual_seed(0)
    vocabulary = -(-ways.vocabulary // 64) * 64
    config = BertConfig(vocabulary=vocabulary, positions=LONGEST, dropout=0.0, **shape)
    model = BertForClassification(config, classes=2).to(device)
    model.encoder.embeddings.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    text, places = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0)
    for number in range(rounds + 1):  # the first round warms up
        for way in WAYS:
            batches = [ways.batch(way, number * steps + i) for i in range(steps)]
            synchronise(device)
            began = time.perf_counter()
            for batch, _ in batches:
                step(model, optimizer, batch)
            synchronise(device)
            seconds = time.perf_counter() - began
            if number:
                rates[way].append(sum(tokens for _, tokens in batches) / seconds)
                text[way] += sum(tokens for _, tokens in batches)
                places[way] += sum(batch["tokens"].numel() for batch, _ in batches)
    mean = float(ways.data.lengths.mean())
    return [
        {
            "mix": mix,
            "mean_length": round(mean, 1),
            "longest": ways.longest,
            "batch_size": ways.batch_size,
            "way": way,
            "tokens_per_s": round(statistics.median(rates[way])),
            "ratio": round(statistics.median(a / b for a, b in zip(rates[way], rates["fixed"], strict=True)), 2),
            "text_share": round(text[way] / places[way], 3),
        }
        for way in WAYS
    ]


def synchronise(device: torch.device) -> None:
    """Wait for the device, where it works beside the host."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure, print, and save if asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each way in a round")
    parser.add_argument("--mix", default=",".join(MIXES))
    parser.add_argument("--save", action="store_true", help=f"append to {RESULTS.relative_to(ROOT)}")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = []
    for mix in arguments.mix.split(","):
        for row in measure(mix, arguments.rounds, arguments.steps, device):
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.save:
        append(RESULTS, rows, python=platform.python_version(), device=name, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
