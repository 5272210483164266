"""Shards read by this rank's workers: full batches until the end, and a place that any ranks and workers can take up."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from fasttrain.data.data import Data
from fasttrain.data.lost import OF_READING, deaths_explained
from fasttrain.data.naming import rows_of
from fasttrain.data.order import at_most
from fasttrain.data.reading import Portion, Position
from fasttrain.data.seeds import mix, own_randomness
from fasttrain.data.shards import DONE, Shards, Taken, dealt, epoch_order, samples_of
from fasttrain.data.streamed import Streamed
from fasttrain.data.together import Joined, Piece
from fasttrain.data.workers import Duty, end, read
from fasttrain.distributed.world import World
from fasttrain.errors import CheckpointError, ConfigError
from fasttrain.lazy import torch


class Packet(NamedTuple):
    """What a worker sends: a whole batch, or at its end (`batch` is None) the samples that fill none.

    `given`: samples given from each shard once the packet is, `DONE` where that is all of them.
    """

    epoch: int
    stream: int
    batch: Any
    rest: list[Taken]
    given: dict[int, int]


class Layout(NamedTuple):
    """How an epoch is dealt to streams, one a worker: what was given of it before, and since; and which stream is next."""

    base: dict[int, int]
    given: dict[int, int]
    turn: int


FRESH = Layout({}, {}, 0)


class Packets:
    """What the workers of a rank read, asked for by epoch; in each worker a part of its own."""

    def __init__(
        self, source: Shards, collate: Any, share: int, seed: int, shuffle: bool, rank: int, ranks: int
    ) -> None:
        self.source, self.collate, self.share, self.seed, self.shuffle = source, collate, share, seed, shuffle
        self.rank, self.ranks = rank, ranks
        self.begun: tuple[int, Layout] = (0, FRESH)
        self._reading: tuple[int, Iterator[Packet]] | None = None

    def __getitem__(self, epoch: int) -> Packet:
        """The next packet of an epoch; empty ones after the last."""
        info = torch.utils.data.get_worker_info()
        stream, streams = (info.id, info.num_workers) if info is not None else (0, 1)
        if self._reading is None or self._reading[0] != epoch:
            self._reading = epoch, self._packets(epoch, stream, streams)
        return next(self._reading[1], Packet(epoch, stream, None, [], {}))

    def _packets(self, epoch: int, stream: int, streams: int) -> Iterator[Packet]:
        layout = self.begun[1] if epoch == self.begun[0] else FRESH
        order = epoch_order(len(self.source.shards), self.seed, epoch, self.shuffle)
        mine = dealt(order, layout.base, self.rank * streams + stream, self.ranks * streams)
        held: list[Taken] = []
        done: dict[int, int] = {}
        so_far = layout.base | layout.given
        for shard in mine:
            if so_far.get(shard) == DONE:
                continue
            for taken in samples_of(self.source, shard, self.seed, epoch, self.shuffle, so_far.get(shard, 0)):
                held.append(taken)
                if len(held) == self.share:
                    given = {one.shard: one.given for one in held} | done
                    yield Packet(epoch, stream, self.collate([one.sample for one in held]), [], given)
                    held, done = [], {}
            done[shard] = DONE
        yield Packet(epoch, stream, None, held, done)


class Asked:
    """The epoch to read, over and over: a sampler. Workers are asked ahead, and answer that there is no more."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.epoch


class ByShards(Streamed):
    """This rank's part of shards; the position counts samples over all ranks.

    With the same ranks and workers a run that is taken up goes on with the very batches that would have come. With others
    the shards that are left are dealt anew, begun ones where they were left.
    """

    counts = "samples"

    def __init__(
        self,
        data: Data,
        source: Shards,
        batch_size: int,
        seed: int,
        world: World,
        limit: float | None,
        train: bool = True,
    ) -> None:
        self.data, self.source, self.seed = data, source, seed
        self.shuffle, self.train = data.shuffle and train, train
        self.share, self.batch_size = max(1, batch_size // world.size), batch_size
        self.streams = max(1, data.workers)
        self._layout, self._epoch = FRESH, 0
        super().__init__(world, source.length, self._most_steps(limit))
        readers = self.streams * world.size
        if world.is_main and len(source.shards) < readers:
            idle = readers - len(source.shards)
            warnings.warn(
                f"{len(source.shards)} shards for {world.size} ranks x {self.streams} workers: {idle} of them have nothing "
                "to read; make more and smaller shards, or set a smaller num_workers.",
                stacklevel=2,
            )

    def _most_steps(self, limit: float | None) -> int | None:
        if limit is None or limit >= 1:
            return None if limit is None else int(limit)
        if self.source.length is None:
            raise ConfigError(
                f"limit_batches={limit} is a share of the steps, and the shards do not say how many samples they hold; give "
                "a number of steps, or Shards(length=...)."
            )
        return max(1, at_most(limit, -(-self.source.length // self.batch_size)))

    def told(self, portion: Portion, rows: Sequence[int] | None = None) -> str:
        """How far the epoch is with a portion, or with which of its samples."""
        return f"{rows_of(rows)}{portion.here} samples from sample {portion.first} of epoch {portion.epoch} of the shards on"

    @property
    def can_begin_anew(self) -> bool:
        """Shards can be read again at any time."""
        return True

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Reading moves no generator but its own."""
        return contextlib.nullcontext()

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch by the declared length."""
        length = self._length()
        return None if length is None else -(-length // self.batch_size)

    def _length(self) -> int | None:
        most = None if self.limit is None else self.limit * self.batch_size
        return most if self.declared is None else min(self.declared, most or self.declared)

    def _counted(self, step: Joined) -> int:
        return step.everywhere

    # ---- reading

    def portions(self, position: Position) -> Generator[Portion, None, None]:
        """Portions from a position on, through one epoch after the other, without end."""
        self._open(position)
        try:
            yield from super().portions(position)
        finally:
            self._close()

    def beside(self, position: Position) -> Generator[Portion, None, None]:
        """From the first batch of this epoch on, of this rank alone, by a reader of its own."""
        reader = ByShards(self.data, self.source, self.batch_size, self.seed, self.world, self.limit, self.train)
        reader._open(Position(position.epoch, 0))
        return super(ByShards, reader).beside(position)

    def once(self) -> Iterator[Portion]:
        """What this rank has of one epoch, which may be nothing; no other rank is asked."""
        self._open(Position())
        try:
            for number, piece in enumerate(self._pieces(Position())):
                yield Portion(piece.batch, piece.samples, 0, 0, number, Position())
        finally:
            self._close()

    def _open(self, position: Position) -> None:
        """Begin to read, by workers that stay for all epochs."""
        data, world = self.data, self.world
        collate = data.collate or torch.utils.data.default_collate
        packets = Packets(self.source, collate, self.share, self.seed, self.shuffle, world.rank, world.size)
        self._epoch = position.epoch
        self._layout = self._layout if position.seen else FRESH
        packets.begun = position.epoch, self._layout
        self._asked = Asked()
        self._loader = torch.utils.data.DataLoader(
            cast(Any, packets),
            batch_size=None,
            sampler=cast(Any, self._asked),
            num_workers=data.workers,
            timeout=(data.timeout_s or 0) if data.workers else 0,
            collate_fn=cast(Any, _as_it_is),
            generator=torch.Generator().manual_seed(mix(self.seed, "workers")),
        )
        self._packets: Iterator[Packet] | None = None
        self._iterator: Any = None

    def _close(self) -> None:
        # Now, and whoever holds an error with its frames. When garbage is collected, queues would go before workers.
        if self._iterator is not None:
            end(self._iterator)
        self._packets = self._iterator = None

    def _pieces(self, position: Position) -> Iterator[Piece]:
        self._asked.epoch = position.epoch
        if self._packets is None:
            duty = Duty("training data" if self.train else "evaluation data", self.share)
            self._iterator = read(self._loader, duty)
            self._packets = _undisturbing(self._iterator, self.data.workers)
        turn = self._layout.turn if position.seen else 0
        steps = None if self.limit is None else max(0, self.limit - position.seen // self.batch_size)
        return itertools.islice(self._batches(self._packets, position.epoch, turn), steps)

    def _batches(self, packets: Iterator[Packet], epoch: int, turn: int) -> Iterator[Piece]:
        arrived: list[deque[Packet]] = [deque() for _ in range(self.streams)]
        rests: dict[int, Packet] = {}
        # One stream after the other, those at their end left out: the order hangs on nothing but the data.
        for stream in itertools.cycle([*range(turn, self.streams), *range(turn)]):
            if len(rests) == self.streams:
                break
            if stream in rests:
                continue
            while not arrived[stream]:
                packet = next(packets)
                if packet.epoch == epoch:
                    arrived[packet.stream].append(packet)
            packet = arrived[stream].popleft()
            if packet.batch is None:
                rests[stream] = packet
            else:
                yield Piece(packet.batch, self.share, True, (packet.given, (stream + 1) % self.streams))
        # What the workers had left is put together, so that no batch but the last one is short.
        left = [taken for stream in sorted(rests) for taken in rests[stream].rest]
        ends = {shard: n for packet in rests.values() for shard, n in packet.given.items()}
        last = {taken.shard: taken.given for taken in left}
        for first in range(0, len(left), self.share):
            taken = left[first : first + self.share]
            given = {one.shard: one.given for one in taken}
            done = {shard: DONE for shard, n in given.items() if n == last[shard] and ends.get(shard) == DONE}
            collate = self.data.collate or torch.utils.data.default_collate
            yield Piece(collate([one.sample for one in taken]), len(taken), True, (given | done, 0))

    def _finished(self, batch: Any, epoch: int, first: int) -> Any:
        if self.data.transform is None or not self.train:
            return batch
        with own_randomness(mix(self.seed, "batch", epoch, first, self.world.rank)):
            return self.data.transform(batch)

    # ---- where a run stands

    def given(self, portion: Portion) -> None:
        """Note how far the shards are with a portion that was given."""
        if portion.after.epoch != self._epoch:
            self._layout, self._epoch = FRESH, portion.after.epoch
        elif portion.mark is not None:
            given, turn = portion.mark
            self._layout = Layout(self._layout.base, {**self._layout.given, **given}, turn)

    def state_dict(self) -> dict[str, Any]:
        """What was given of each shard in this epoch; what of it before the shards were dealt as they are now."""
        layout = self._layout
        return {
            "shards": _digest(self.source),
            "base": {str(shard): n for shard, n in layout.base.items()} if self.world.is_main else {},
            "given": {str(shard): n for shard, n in layout.given.items()},
            "turn": layout.turn,
            "streams": self.streams,
        }

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take up an epoch in its middle, by any ranks and workers.

        Raises:
            CheckpointError: it was an epoch of other shards.
        """
        if any(state.get("shards") != _digest(self.source) for state in states):
            raise CheckpointError(
                "the checkpoint is in the middle of an epoch of other shards than these: which samples were given cannot be "
                "told; give the same list in the same order until the epoch is over."
            )
        base = _numbers(states[0]["base"])
        everywhere = {shard: n for state in states for shard, n in _numbers(state["given"]).items()}
        if len(states) == self.world.size and states[0]["streams"] == self.streams:
            mine = states[self.world.rank]
            self._layout = Layout(base, _numbers(mine["given"]), mine["turn"])
        else:
            self._layout = Layout(base | everywhere, {}, 0)


def _numbers(given: Mapping[str, int]) -> dict[int, int]:
    return {int(shard): n for shard, n in given.items()}


def _digest(shards: Shards) -> str:
    names = "\n".join(map(str, shards.shards))
    return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()


def _as_it_is(packet: Packet) -> Packet:
    return packet


def _undisturbing(packets: Iterator[Packet], workers: int) -> Iterator[Packet]:
    """In this process, drawing for samples leaves the run's own generators as they were."""
    if workers:
        with deaths_explained(OF_READING):
            yield from packets
        return
    while True:
        with own_randomness(0):
            packet = next(packets, None)
        if packet is None:
            return
        yield packet
