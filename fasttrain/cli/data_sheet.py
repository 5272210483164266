"""A contact sheet of training images as the device sees them, and text of training samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fasttrain.core.batch import Microbatches, map_tensors
from fasttrain.core.plan import Plan
from fasttrain.core.task import Task
from fasttrain.lazy import np, pytree, torch

COLUMNS, ROWS = 8, 8
LEAST, MOST = 64, 192  # pixels a side of a picture on the sheet
TEXT_HEIGHT = 14
SHOWN_TEXTS = 4


def contact_sheet(trainer: Any, folder: Path, names: Any) -> tuple[Path | None, list[str] | None]:
    """Write `sheet.png` of the first training images, transformed and augmented; and give samples as text.

    `None` for either where the batches have none. Values of whole numbers are shown as they are, others from the least to
    the largest of the sheet.
    """
    task = getattr(trainer, "task", None) or Task(None, lambda batch: None)
    plan = getattr(trainer, "plan", None) or Plan([], trainer.context())
    images, labels, held = [], [], 0
    text = None
    batches = trainer.feed.training(task, plan, steps=COLUMNS * ROWS)
    # What was laid out by microbatches stays in them.
    parts = (part for batch in batches for part in (batch if isinstance(batch, Microbatches) else [batch]))
    for batch in parts:
        batch = map_tensors(lambda tensor: tensor.detach().cpu(), batch)
        text = trainer.as_text(batch) if text is None else text
        found = _images(batch)
        if found is None:
            break
        images.append(found)
        label = trainer.label_of(batch)
        labels += [None] * len(found) if label is None else label.tolist()
        held += len(found)
        if held >= COLUMNS * ROWS:
            break
    shown = None if text is None else text[:SHOWN_TEXTS]
    if not images:
        return None, shown
    folder.mkdir(parents=True, exist_ok=True)
    _draw(images, labels, names).save(folder / "sheet.png")
    return folder / "sheet.png", shown


def _images(batch: Any) -> Any:
    """The first entry that is images, as `[batch, height, width, 1 or 3]`."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 4:
            if leaf.shape[1] in (1, 3):
                return leaf.permute(0, 2, 3, 1)
            if leaf.shape[3] in (1, 3):
                return leaf
    return None


def _draw(batches: list[Any], labels: list[int | None], names: Any) -> Any:
    from PIL import Image, ImageDraw

    pictures = [picture for batch in batches for picture in batch][: COLUMNS * ROWS]
    if pictures[0].is_floating_point():
        low = min(float(picture.min()) for picture in pictures)
        span = max(max(float(picture.max()) for picture in pictures) - low, 1e-12)
        pictures = [(picture.float() - low) * (255 / span) for picture in pictures]
    largest = max(max(picture.shape[:2]) for picture in pictures)
    side = min(max(LEAST, largest), MOST)
    rows = -(-len(pictures) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (side + 4), rows * (side + TEXT_HEIGHT + 4)), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (picture, label) in enumerate(zip(pictures, labels, strict=False)):
        pixels = picture.round().clamp(0, 255).to(torch.uint8).numpy()
        image = Image.fromarray(np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels)
        scale = side / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        x, y = (i % COLUMNS) * (side + 4) + 2, (i // COLUMNS) * (side + TEXT_HEIGHT + 4) + 2
        sheet.paste(image.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BILINEAR), (x, y))
        if label is not None:
            called = str(label) if names is None or not 0 <= label < len(names) else f"{label} {names[label]}"
            pen.text((x, y + side + 1), called[: side // 6], fill="black")
    return sheet
