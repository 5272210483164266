"""Average gradients over ranks in place, while the backward pass still runs.

A hook on each parameter tells when its gradient is complete; gradients travel together in buckets, one asynchronous sum
each, in one fixed order on all ranks. The model object, its names and its methods stay as they are, and no wrapper has
to see the forward: whatever gradients are there when a synchronised microbatch ends, their average is there afterwards.

    averager = average_gradients(model)
    for microbatch in microbatches[:-1]:
        loss(model, microbatch).backward()
    with averager.last():
        loss(model, microbatches[-1]).backward()
    optimizer.step()
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fasttrain.core.strategy import NO_CONTEXT
from fasttrain.distributed.bucket import Bucket
from fasttrain.distributed.replicas import broadcast_tensors, check_replicas
from fasttrain.errors import CheckpointError, ConfigError, SyncError
from fasttrain.lazy import dist, torch

if TYPE_CHECKING:
    from torch import nn

    from fasttrain.distributed.communication_hooks import CommunicationHook

MIB = 2**20
# The first bucket is small, so that something travels early; the value is that of torch's DDP.
FIRST_BUCKET_MB = 1.0


@dataclass(slots=True)
class Traffic:
    """What was sent so far: rounds of averaging, sums launched in them, those launched before backward had ended,
    and bytes of all buffers before a hook compressed them."""

    rounds: int = 0
    reductions: int = 0
    early: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Layout:
    """The buckets for one set of trained parameters, and what `static_graph` knows of them (by position)."""

    buckets: list[Bucket]
    where: list[Bucket | None]
    settled: bool = False
    unused: frozenset[int] = frozenset()
    absent: frozenset[int] | None = None
    left: list[int] = field(default_factory=list)


class _Last:
    """The context of a synchronised microbatch; one object, entered again and again."""

    __slots__ = ("averager",)

    def __init__(self, averager: GradientAverager) -> None:
        self.averager = averager

    def __enter__(self) -> None:
        self.averager._begin()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.averager._end(abandoned=kind is not None)


class GradientAverager:
    """Averages gradients of models over ranks; see `average_gradients`. `traffic` counts what was sent."""

    def __init__(
        self,
        group: Any = None,
        *,
        host_group: Any = None,
        bucket_mb: float = 25.0,
        bucket_view: bool = True,
        static_graph: bool = False,
        hook: CommunicationHook | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self.host_group = group, group if host_group is None else host_group
        self.ranks = dist.get_world_size(group)
        self.bucket_bytes = int(bucket_mb * MIB)
        self.bucket_view, self.static_graph, self.hook, self.reduce_dtype = (
            bucket_view,
            static_graph,
            hook,
            reduce_dtype,
        )
        self.traffic = Traffic()
        self._parameters: list[Any] = []
        self._names: list[str] = []
        self._handles: dict[int, Any] = {}
        self._layouts: dict[tuple[bool, ...], Layout] = {}
        self._layout = Layout([], [])
        self._num_buckets = self._depth = self._next = 0
        self._armed = False
        self._seen = bytearray()
        self._changed: set[int] = set()
        # Parameters on the host and on a device are finished by two threads of autograd.
        self._lock = threading.Lock()
        self._last = _Last(self)

    # ---- set-up

    def add(self, model: nn.Module) -> None:
        """Take the parameters of a model, after making the model equal to rank 0's on all ranks.

        Raises:
            SyncError: the model is not built alike on all ranks.
            ConfigError: it has a parameter that cannot be averaged.
        """
        for name, parameter in model.named_parameters():
            if torch.nn.parameter.is_lazy(parameter):
                raise ConfigError(
                    f"'{name}' has no shape yet, so it cannot be copied to other ranks; run one forward first."
                )
            if hasattr(parameter, "to_local"):
                raise ConfigError(
                    f"'{name}' is spread over ranks already; ddp needs whole parameters: use data_parallel=fsdp."
                )
        check_replicas(model, self.host_group)
        broadcast_tensors([*model.parameters(), *model.buffers()], self.group, self.host_group)
        known = {id(parameter) for parameter in self._parameters}
        for name, parameter in model.named_parameters():
            if id(parameter) not in known:
                self._parameters.append(parameter)
                self._names.append(name)
        self._layouts, self._num_buckets = {}, 0

    def equalise_buffers(self, model: nn.Module) -> None:
        """Give every rank the buffers (running statistics) of rank 0."""
        broadcast_tensors(model.buffers(), self.group, self.host_group)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def last(self) -> AbstractContextManager[None]:
        """Around forward and backward of the last microbatch of a step: on leaving, `.grad` is the average."""
        return self._last if self.ranks > 1 else NO_CONTEXT

    def _plan(self, trained: tuple[bool, ...], leave_out: frozenset[int] = frozenset()) -> Layout:
        """Cut the trained parameters into buckets: last registered first, by dtype and device."""
        filling: dict[tuple[Any, Any], list[int]] = {}
        held: dict[tuple[Any, Any], int] = {}  # bytes; summed up as they come, for there may be ten thousand parameters
        done: list[list[int]] = []
        for position in reversed(range(len(self._parameters))):
            if not trained[position] or position in leave_out:
                continue
            parameter = self._parameters[position]
            kind = (parameter.dtype, parameter.device)
            members = filling.setdefault(kind, [])
            members.append(position)
            limit = self.bucket_bytes if done else min(self.bucket_bytes, int(FIRST_BUCKET_MB * MIB))
            held[kind] = held.get(kind, 0) + parameter.nbytes
            if held[kind] >= limit:
                done.append(filling.pop(kind))
                del held[kind]
        # A bucket can leave when its earliest registered parameter is done, which backward reaches last.
        done = sorted([*done, *filling.values()], key=lambda members: -members[-1])
        where: list[Bucket | None] = [None] * len(self._parameters)
        buckets = []
        for members in done:
            bucket = self._bucket(members)
            buckets.append(bucket)
            for position in members:
                where[position] = bucket
                if position not in self._handles:
                    arrive = functools.partial(self._arrive, position)
                    self._handles[position] = self._parameters[position].register_post_accumulate_grad_hook(arrive)
        return Layout(buckets, where, left=sorted(leave_out))

    def _bucket(self, members: list[int]) -> Bucket:
        parameters = [self._parameters[position] for position in members]
        dtype = parameters[0].dtype
        if self.hook is not None and dtype.is_complex:
            raise ConfigError(
                f"'{self._names[members[0]]}' is complex, which gradient hooks cannot compress; use hook=null."
            )
        # float64 is chosen where every digit counts; what precision says of reductions is about narrower dtypes.
        narrow = dtype.is_floating_point and dtype != torch.float64
        sent = self.reduce_dtype if self.reduce_dtype is not None and narrow else dtype
        self._num_buckets += 1
        return Bucket(self._num_buckets - 1, members, parameters, sent, self.bucket_view and sent == dtype)

    # ---- one round

    def _begin(self) -> None:
        self._depth += 1
        if self._depth > 1:  # a synchronised microbatch within another is part of it
            return
        try:
            trained = tuple([parameter.requires_grad for parameter in self._parameters])
            layout = self._layouts.get(trained)
            if layout is None:
                layout = self._layouts[trained] = self._plan(trained)
            for bucket in layout.buckets:
                absent = layout.absent
                bucket.waiting = len(bucket.members) - (len(absent.intersection(bucket.members)) if absent else 0)
        except BaseException:
            self._depth -= 1
            raise
        self._layout, self._trained, self._next = layout, trained, 0
        self._seen, self._changed = bytearray(len(self._parameters)), set()
        self._armed = True

    def _arrive(self, position: int, parameter: Any) -> None:
        """The hook: a gradient is complete as far as one backward pass goes."""
        if not self._armed:
            return
        with self._lock:
            layout = self._layout
            bucket = layout.where[position]
            if bucket is None or (layout.absent and position in layout.absent):
                self._unforeseen(position)
                return
            if bucket.buffer is not None:
                raise SyncError(
                    f"two backward passes of one synchronised microbatch reached '{self._names[position]}', and its "
                    "gradient was on its way to the other ranks after the first; take them out of "
                    "`with plan.microbatch(True)` and write plan.backward(loss, is_last=False) for all but the last "
                    "(without a plan: put the last one alone into `with averager.last()`)."
                )
            if self._seen[position]:
                return
            self._seen[position] = 1
            bucket.waiting -= 1
            while self._next < len(layout.buckets) and layout.buckets[self._next].waiting == 0:
                self._launch(layout.buckets[self._next])

    def _unforeseen(self, position: int) -> None:
        if not self._layout.settled:
            raise SyncError(
                f"'{self._names[position]}' began to train within a synchronised microbatch, so no other rank expects "
                "its gradient; set requires_grad before the microbatch, on all ranks alike."
            )
        # Told when the round is over: an error here, on one rank, would leave the others waiting.
        self._changed.add(position)

    def _launch(self, bucket: Bucket) -> None:
        with torch.no_grad():
            bucket.fill()
            self._next += 1
            if self.hook is not None:
                bucket.work = self.hook.launch(bucket, is_last=self._next == len(self._layout.buckets))
            else:
                # Before the sum, as torch's DDP does: sums of float16 overflow, and two ranks get equal bits.
                bucket.buffer.mul_(1 / self.ranks)
                bucket.work = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
        self.traffic.reductions += 1
        self.traffic.bytes += bucket.buffer.nbytes

    def _end(self, abandoned: bool) -> None:
        self._depth -= 1
        if self._depth:
            return
        layout = self._layout
        try:
            if not abandoned and layout.buckets:
                self.traffic.early += self._next
                while self._next < len(layout.buckets):
                    self._launch(layout.buckets[self._next])
                self._finish(layout)
                self.traffic.rounds += 1
        finally:
            self._armed = False
            for bucket in layout.buckets:
                bucket.clear()

    def _finish(self, layout: Layout) -> None:
        absent: set[int] = set()
        unused: set[int] = set()
        with torch.no_grad():
            for bucket in layout.buckets:
                bucket.work.wait()
                give = bucket.missing
                if layout.settled:
                    give = [i for i in give if bucket.members[i] not in layout.unused]
                elif give or self.static_graph:  # only a rank that misses a gradient reads the device
                    used = bucket.used(self.ranks)
                    give = [i for i in give if used[i]]
                    unused.update(
                        position for position, is_used in zip(bucket.members, used, strict=True) if not is_used
                    )
                absent.update(bucket.members[i] for i in bucket.missing)
                bucket.spread(give)
        if self.static_graph:
            idle = len(absent) == sum(len(bucket.members) for bucket in layout.buckets)
            if layout.settled:
                self._compare(layout, frozenset(absent), idle)
            else:
                self._settle(layout, frozenset(absent), frozenset(unused), idle)

    # ---- static_graph

    def _settle(self, layout: Layout, absent: frozenset[int], unused: frozenset[int], idle: bool) -> None:
        """After the first round: what no rank used leaves the buckets. All ranks read the same flags."""
        if len(unused) == sum(len(bucket.members) for bucket in layout.buckets):
            return  # nothing was computed anywhere
        if unused and not (self.hook is not None and self.hook.keeps_buckets):
            layout = self._layouts[self._trained] = self._plan(self._trained, leave_out=unused)
            absent = absent - unused
        layout.settled, layout.unused, layout.absent = True, unused, None if idle else absent

    def _compare(self, layout: Layout, absent: frozenset[int], idle: bool) -> None:
        """A rank without any gradient had nothing to compute; that is no change of the graph."""
        if layout.absent is None and not idle:
            layout.absent = absent
        changed = set(self._changed)
        if not idle and layout.absent is not None:
            changed |= absent ^ layout.absent
        changed |= {position for position in layout.left if self._parameters[position].grad is not None}
        if changed:
            names = ", ".join(f"'{self._names[position]}'" for position in sorted(changed)[:5])
            raise SyncError(
                "static_graph=true says that the same parameters get gradients in every step, and that changed on "
                f"rank {dist.get_rank(self.group)} for {names}; use data_parallel.ddp.static_graph=false."
            )

    # ---- kept in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What a hook remembers, of this rank: tensors and plain values. Empty where nothing is remembered."""
        if self.hook is None or not (state := self.hook.state_dict()):
            return {}
        masks = ["".join("1" if trained else "0" for trained in key) for key in self._layouts]
        return {"layouts": masks, **state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; the models must have been added.

        Raises:
            CheckpointError: it was taken with another model or other buckets.
        """
        if self.hook is None or not state:
            return
        self._layouts, self._num_buckets = {}, 0
        for mask in state["layouts"]:
            if len(mask) != len(self._parameters):
                raise CheckpointError(
                    f"the saved state of data_parallel is of a model with {len(mask)} parameters, and this one has "
                    f"{len(self._parameters)}; resume with the same model."
                )
            trained = tuple(mark == "1" for mark in mask)
            self._layouts[trained] = self._plan(trained)
        self.hook.load_state_dict(state)
        buckets = [bucket for layout in self._layouts.values() for bucket in layout.buckets]
        self.hook.check({bucket.index: bucket.numel + len(bucket.members) for bucket in buckets})


def average_gradients(model: nn.Module, group: Any = None, **settings: Any) -> GradientAverager:
    """Make a model equal on all ranks and average its gradients from then on, in place; names stay.

    Saves: the time of 1 - 1/n of the samples on n ranks. Costs: a sum of all gradients a step, most of it hidden behind
    the backward pass; one bucket of memory more while gradients travel (`bucket_view=False`: all of them once more).
    Needs: the same model and the same trained parameters on every rank. A parameter that gets no gradient on some ranks
    counts as zeros there; one that gets none anywhere keeps `None`. A missing gradient holds back its bucket and those
    after it until backward has ended, and its rank reads the device once; `static_graph=True` (the same parameters
    unused in every step) avoids both.

    `settings`: `host_group` (carries host objects; `None`: `group`), `bucket_mb` (MiB), `bucket_view` (gradients are
    views of buckets), `static_graph`, `hook` (see `communication_hooks.make_hook`), `reduce_dtype` (`None`: that of the
    parameters).

    Raises:
        SyncError: the model is not built alike on all ranks.
    Source: Li et al. 2020, arXiv:2006.15704.
    """
    averager = GradientAverager(group, **settings)
    if averager.ranks > 1:
        averager.add(model)
    return averager
