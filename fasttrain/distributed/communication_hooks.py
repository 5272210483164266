"""Torch's communication hooks for gradients, run on buckets that are not DDP's.

The hooks in `torch.distributed.algorithms.ddp_comm_hooks` ask a bucket for a few methods only; `HookBucket` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fasttrain.errors import CheckpointError, ConfigError, did_you_mean
from fasttrain.lazy import dist, np, torch

if TYPE_CHECKING:
    from torch import Tensor

    from fasttrain.distributed.bucket import Bucket

# A matrix of zeros (a parameter that no rank used) would be divided by its norm; torch's default of 0 makes that NaN,
# and the low-rank factors keep it for ever.
ORTHOGONALIZATION_EPSILON = 1e-8


class HookBucket:
    """A bucket as torch's communication hooks know it (the methods of `torch.distributed.GradBucket`)."""

    __slots__ = ("_bucket", "_is_last")

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket, self._is_last = bucket, is_last

    def index(self) -> int:
        """Number of the bucket; the same in every step."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """All that travels, as one flat tensor."""
        return self._bucket.buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Put another tensor in the place of the buffer's values."""
        self._bucket.buffer.copy_(tensor)

    def gradients(self) -> list[Tensor]:
        """The buffer in pieces, one a parameter, in the order in which memory holds them; the used-flags come last.

        A hook views a gradient as a matrix, which neither a scalar nor a channels-last weight allows as it is.
        """
        pieces = []
        for (shape, strides, offset), parameter in zip(self._bucket.places, self._bucket.parameters, strict=True):
            dims = sorted(range(len(shape)), key=lambda dim: -strides[dim])
            in_memory = [shape[dim] for dim in dims] or [1]
            if parameter.numel():
                pieces.append(self._bucket.buffer[offset : offset + parameter.numel()].view(in_memory))
        return [*pieces, self._bucket.flags()]

    def parameters(self) -> list[Any]:
        """The parameters of the bucket."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this bucket ends the round."""
        return self._is_last


class CommunicationHook:
    """How a bucket is averaged when not by a plain sum.

    `function(state, bucket) -> Future` is any communication hook of torch that works in place on `bucket.buffer()`.
    `keeps_buckets`: the hook remembers things by bucket, so buckets must stay as they are. `blocking`: it starts
    collectives from its callbacks, so where gloo carries them no other collective may be started meanwhile.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        state: Any = None,
        *,
        group: Any = None,
        keeps_buckets: bool = False,
        blocking: bool = False,
    ) -> None:
        self.function, self.state, self.group = function, state, group
        self.keeps_buckets, self.blocking = keeps_buckets, blocking

    def launch(self, bucket: Bucket, is_last: bool) -> Any:
        """Start averaging a bucket; something with `wait()`."""
        future = self.function(self.state, HookBucket(bucket, is_last))
        if self.blocking and _carried_by_gloo(bucket.buffer, self.group):
            future.wait()
        return future

    def state_dict(self) -> dict[str, Any]:
        """What the hook remembers: tensors and plain values; of this rank alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank."""

    def check(self, numels: Mapping[int, int]) -> None:
        """Refuse a memory that does not fit the buckets, given by index with the elements of their buffers."""


def _carried_by_gloo(tensor: Tensor, group: Any) -> bool:
    # dist.get_backend() names them all ("cpu:gloo,cuda:nccl") where a group has one for each device.
    group = dist.group.WORLD if group is None else group
    return "gloo" in group._get_backend(tensor.device).name().lower()


class PowerSgdHook(CommunicationHook):
    """Low-rank gradients with error feedback; its memory can be saved and taken back.

    Source: Vogels et al. 2019, arXiv:1905.13727; torch's `powerSGD_hook`.
    """

    def __init__(self, group: Any, rank: int, start_step: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook

        state = torch_hook.PowerSGDState(
            process_group=group if group is not None else dist.group.WORLD,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start_step,
            orthogonalization_epsilon=ORTHOGONALIZATION_EPSILON,  # pyright: ignore[reportArgumentType]
        )
        self._error = f"error.{dist.get_rank(group)}"
        # The hook starts its second and third sum from callbacks. With NCCL these run at once, in the launching thread;
        # with gloo in worker threads, where the order of two buckets' sums would differ from rank to rank.
        super().__init__(torch_hook.powerSGD_hook, state, group=group, keeps_buckets=True, blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Error feedback and low-rank factors by bucket, the iteration, the generator.

        Flat: each value is a tensor or a plain number. The error is each rank's own, and its key names the rank;
        everything else is alike on all ranks.
        """
        state = self.state
        _, keys, position, has_gauss, gauss = state.rng.get_state()
        tensors = {
            f"{name}.{index}": tensor.clone() for name, table in self._tables() for index, tensor in table.items()
        }
        rng = {"rng_position": int(position), "rng_has_gauss": int(has_gauss), "rng_gauss": float(gauss)}
        return {**tensors, "iteration": state.iter, "rng_keys": torch.from_numpy(keys.astype("int64")), **rng}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with equal bits. A rank that was not there then starts without errors."""
        for name, table in self._tables():
            table.clear()
            for key, tensor in state.items():
                owner, _, index = key.rpartition(".")
                if owner == name:
                    table[int(index)] = tensor.clone()
        self.state.iter = state["iteration"]
        keys = state["rng_keys"].cpu().numpy().astype(np.uint32)
        position, has_gauss, gauss = state["rng_position"], state["rng_has_gauss"], state["rng_gauss"]
        self.state.rng.set_state(("MT19937", keys, position, has_gauss, gauss))

    def _tables(self) -> list[tuple[str, dict[int, Tensor]]]:
        state = self.state
        return [(self._error, state.error_dict), ("p", state.p_memory_dict), ("q", state.q_memory_dict)]

    def check(self, numels: Mapping[int, int]) -> None:
        """Refuse a memory that does not fit the buckets, given by index with the elements of their buffers."""
        for index, error in self.state.error_dict.items():
            if numels.get(index) != error.numel():
                raise CheckpointError(
                    f"the saved state of hook=powersgd has {error.numel()} elements for bucket {index}, which holds "
                    f"{numels.get(index, 0)} now; resume with the same model and the same bucket_mb, or leave the "
                    "state of data_parallel out."
                )


def make_hook(name: str, group: Any = None, *, rank: int = 1, start_step: int = 1000) -> CommunicationHook:
    """A communication hook by name: 'bf16', 'fp16' (half the bytes) or 'powersgd' (low-rank, with error feedback).

    `rank` and `start_step` (synchronised steps before compression begins, at least 2) are for powersgd.

    Raises:
        ConfigError: there is no such hook.
    """
    if name == "powersgd":
        return PowerSgdHook(group, rank, start_step)
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    functions = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
    if name not in functions:
        raise ConfigError(f"there is no gradient hook '{name}'; {did_you_mean(name, [*functions, 'powersgd'])}")
    return CommunicationHook(functions[name], group)
