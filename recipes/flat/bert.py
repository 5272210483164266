"""Masked-language-model training of a BERT in plain PyTorch: the same numbers as `recipes/bert.py`, with no framework.

It reads from top to bottom and is the specification of that recipe: same weights, same order of sequences, same masks,
same updates. `python -m recipes.flat.bert --steps 20` runs the settings of `configs/bert_docstrings.yaml`.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasttrain.data.seeds import mix
from fasttrain.data.text import Corpus, TextConfig, corpus, mask_tokens, masked_positions, unigram_entropy
from fasttrain.models.bert import BertForMaskedLM
from fasttrain.models.bert_config import BertConfig

HELD_OUT_MASKS = 0  # the seed of the masks that every run is evaluated on


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of `configs/bert_docstrings.yaml`. `steps` is the whole schedule, however many of them are run."""

    data: TextConfig = field(default_factory=lambda: TextConfig(vocabulary=4096))
    width: int = 128
    layers: int = 2
    heads: int = 2
    feedforward: int = 512
    dropout: float = 0.0
    initial_std: float = 0.08
    seed: int = 0
    batch_size: int = 16
    steps: int = 2400
    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    warmup: int = 100
    max_norm: float = 1.0
    bf16: bool = False


def hide(
    tokens: Tensor, text: Corpus, probability: float, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """A batch to train on: tokens with some hidden, where they are, and what they were."""
    tokens, labels = mask_tokens(
        tokens,
        vocabulary=text.vocabulary,
        mask_id=text.mask_id,
        special_ids=text.special_ids,
        probability=probability,
        generator=generator,
    )
    positions, labels = masked_positions(labels)
    return {"tokens": tokens, "positions": positions, "labels": labels}


def loss_of(model: nn.Module, batch: dict[str, Tensor], bf16: bool = False) -> tuple[Tensor, Tensor]:
    """Mean loss over the hidden tokens, and the scores."""
    with torch.autocast(batch["tokens"].device.type, dtype=torch.bfloat16, enabled=bf16):
        scores = model(batch["tokens"], positions=batch["positions"])
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten()), scores


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then linearly down to 0 after the last step."""
    if step < config.warmup:
        factor = (step + 1) / (config.warmup + 1)
    else:
        factor = (config.steps - step) / (config.steps - config.warmup)
    return config.lr * factor


def groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; embeddings (and the head that is tied to one), norms and biases do not."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decays = [p for p in model.parameters() if p.dim() > 1 and id(p) not in embeddings]
    rest = [p for p in model.parameters() if p.dim() <= 1 or id(p) in embeddings]
    return [{"params": rest, "weight_decay": 0.0}, {"params": decays, "weight_decay": weight_decay}]


def build_model(text: Corpus, config: Config) -> BertForMaskedLM:
    """The model. Its vocabulary is rounded up to a multiple of 64, which matrix kernels like."""
    return BertForMaskedLM(
        BertConfig(
            vocabulary=-(-text.vocabulary // 64) * 64,
            width=config.width,
            layers=config.layers,
            heads=config.heads,
            feedforward=config.feedforward,
            positions=config.data.sequence_length,
            dropout=config.dropout,
            initial_std=config.initial_std,
        )
    )


def train(steps: int | None = None, config: Config | None = None, log_every: int = 0) -> tuple[list[float], nn.Module]:
    """The losses of the first `steps` steps (all of them if left out), and the model after them."""
    config = config or Config()
    steps = config.steps if steps is None else steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = corpus(config.data)
    torch.manual_seed(config.seed)
    model = build_model(text, config).to(device)
    optimizer = torch.optim.AdamW(
        groups(model, config.weight_decay), lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    torch.manual_seed(config.seed)

    losses: list[float] = []
    started, step, epoch, size = time.perf_counter(), 0, 0, config.batch_size
    while step < steps:
        order = torch.Generator().manual_seed(mix(config.seed, "order", epoch))
        permutation = torch.randperm(len(text.train), generator=order)
        for first in range(0, len(permutation), size):
            if step == steps:
                break
            former = torch.get_rng_state()
            torch.default_generator.manual_seed(mix(config.seed, "batch", epoch, first))
            tokens = text.train[permutation[first : first + size]]
            batch = hide(tokens, text, config.data.mask_probability)
            torch.set_rng_state(former)
            batch = {name: tensor.to(device) for name, tensor in batch.items()}

            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            loss, _ = loss_of(model, batch, config.bf16)
            loss.backward()
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], config.max_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            step += 1
            if log_every and step % log_every == 0:
                recent = sum(losses[-log_every:]) / log_every
                print(f"step {step}  loss {recent:.4f}  {time.perf_counter() - started:.1f} s", flush=True)
        epoch += 1
    return losses, model


@torch.no_grad()
def evaluate(model: nn.Module, config: Config | None = None) -> dict[str, float]:
    """Loss, accuracy and perplexity on the hidden tokens of the held-out documents, always the same ones.

    `unigram_entropy`: what the best guess without context could reach on them.
    """
    config = config or Config()
    text, device = corpus(config.data), next(model.parameters()).device
    generator = torch.Generator().manual_seed(HELD_OUT_MASKS)
    held_out = hide(text.held_out, text, config.data.mask_probability, generator)
    entropy = unigram_entropy(held_out["labels"])
    total = correct = counted = 0.0
    model.eval()
    for first in range(0, len(text.held_out), config.batch_size):
        batch = {name: tensor[first : first + config.batch_size].to(device) for name, tensor in held_out.items()}
        loss, scores = loss_of(model, batch, config.bf16)
        is_label = batch["labels"] >= 0
        count = int(is_label.sum())
        total += loss.item() * count
        correct += int(((scores.argmax(-1) == batch["labels"]) & is_label).sum())
        counted += count
    model.train()
    loss = total / counted
    return {
        "loss": loss,
        "accuracy": correct / counted,
        "perplexity": math.exp(loss),
        "unigram_entropy": entropy,
    }


def main() -> None:
    """Train and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="stop after so many steps of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    config = replace(Config(), seed=arguments.seed, bf16=arguments.bf16)
    _, model = train(arguments.steps, config, log_every=10)
    print("  ".join(f"{name} {value:.4f}" for name, value in evaluate(model, config).items()))


if __name__ == "__main__":
    main()
