"""How large training images are as a run goes on: a function of the place in it, so that a resumed run goes on alike."""

from __future__ import annotations

from dataclasses import dataclass

from fasttrain.data.seeds import mix
from fasttrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The side of square training images: growing (progressive resizing), or drawn anew for each step (mixed resolution).

    Until `grow_from` of the run images have the side `smallest`, from `grow_until` on their full side; between the two the
    side grows in steps of `multiple`. With `mixed`, each step before `grow_until` has a side drawn evenly from all of
    these, `smallest` and the full one with them. The last part at full size is what evaluation sees: statistics of norms
    and the classifier come to fit it.

    Saves: 1 - (side / full side)² of a step's time and activations. Costs: some accuracy if the small part is long or very
    small; a graph more for torch.compile (docs/compile_sizes.md).
    Source: Howard et al. 2018 (DAWNBench entry of fast.ai), MosaicML Composer's progressive resizing; Touvron et al. 2019,
    arXiv:1906.06423 (FixRes) for the fit to the size of evaluation; Hoffer et al. 2019, arXiv:1908.08986 (mix and match).

    Raises:
        ConfigError: a number is out of its range.
    """

    smallest: int
    grow_from: float = 0.0
    grow_until: float = 0.8
    mixed: bool = False
    multiple: int = 32

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.smallest < 1:
            raise ConfigError(
                f"sizes.smallest={self.smallest} and sizes.multiple={self.multiple} count pixels; use 128 and 32, say."
            )
        if not 0 <= self.grow_from <= self.grow_until <= 1:
            raise ConfigError(
                f"sizes.grow_from={self.grow_from} and sizes.grow_until={self.grow_until} are shares of the run and follow "
                "each other; use 0.0 and 0.8, for example."
            )

    def sides(self, full: int) -> list[int]:
        """Every side that comes, the smallest first.

        >>> Sizes(smallest=128).sides(224)
        [128, 160, 192, 224]

        Raises:
            ConfigError: `smallest` is more than the full side.
        """
        if self.smallest > full:
            raise ConfigError(f"sizes.smallest={self.smallest} is more than the images' side of {full}; use less.")
        return [*range(self.smallest, full, self.multiple), full]

    def at(self, full: int, progress: float, *place: object) -> int:
        """The side at `progress` of the run (0 to 1); a mixed one is drawn by `place`: the run's seed, epoch and position.

        >>> [Sizes(smallest=128).at(224, tenths / 10) for tenths in range(10)]
        [128, 128, 128, 160, 160, 160, 192, 192, 224, 224]
        """
        sides = self.sides(full)
        if progress >= self.grow_until:
            return full
        if self.mixed:
            return sides[mix(*place, "size") % len(sides)]
        if progress < self.grow_from:
            return sides[0]
        grown = (progress - self.grow_from) / (self.grow_until - self.grow_from) * (full - self.smallest)
        return sides[int(grown / self.multiple)]
