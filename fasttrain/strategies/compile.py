"""compile: let torch.compile generate the code of the repeated blocks, or of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from fasttrain.compiler import cuda_graphs
from fasttrain.compiler.apply import Compiled, compile_forwards
from fasttrain.compiler.cuda_graphs import Generations, Gradients, makes_cuda_graphs
from fasttrain.compiler.functions import compile_loss
from fasttrain.compiler.kept import Kept
from fasttrain.compiler.optimizer_step import compile_optimizer_step
from fasttrain.compiler.padding import Padding, pad_batch
from fasttrain.compiler.reference import Reference
from fasttrain.core.batch import holds_samples
from fasttrain.core.strategy import NO_CONTEXT, Clash, Strategy
from fasttrain.core.task import Task
from fasttrain.distributed.compilers import FirstEvaluation, compile_together, trial
from fasttrain.errors import ConfigError

if TYPE_CHECKING:
    from fasttrain.compiler.report import Report

# Slots that spread one forward and backward over ranks, but for ddp.
SPREADS = ("data_parallel", "pipeline_parallel", "tensor_parallel", "context_parallel")
# Backends of torch that take no notice of a mode.
WITHOUT_MODES = ("eager", "aot_eager", "aot_eager_decomp_partition", "cudagraphs")


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """`backend`, `mode`, `fullgraph` and `dynamic` are torch.compile's; `dynamic=None`: sizes that change become symbols.

    `strict`: whatever is to be compiled and runs uncompiled ends the run.
    `optimizer`, `loss`: compile the step of the optimizer, the loss function, too.
    `cache`: where compiled code is kept for the next start: `auto` (beside the runs of the project), a folder, or `None`
    (where torch puts it). `artifacts`: a file to take compiled code from, and to write it to at the end.
    `reference_steps`: how often forward and backward of a microbatch are timed before the first step, eagerly and compiled;
    0: no comparison. `pad`: entries of a batch that are padded to few sizes, so that few graphs take them.
    """

    backend: str = "inductor"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    strict: bool = False
    optimizer: bool = False
    loss: bool = False
    cache: str | None = "auto"
    artifacts: str | None = None
    reference_steps: int = 3
    pad: Padding | None = None

    def __post_init__(self) -> None:
        for name, value in (("cache", self.cache), ("artifacts", self.artifacts)):
            if value in ("true", "false"):
                raise ConfigError(f"{name}={value} would be a path of that name; give a path, or use {name}=null.")
        if self.mode is not None and self.backend in WITHOUT_MODES:
            raise ConfigError(
                f"mode={self.mode} is for backend=inductor, and {self.backend} would leave it aside; use mode=null."
            )
        if self.reference_steps < 0:
            raise ConfigError(
                f"reference_steps={self.reference_steps} cannot be measured; give a number of steps, or 0 for no comparison."
            )


_OFF = "or compile.optimizer=false"
OPTIMIZER = (
    Clash(
        slot="precision",
        name="bf16_true",
        why="weights in 16 bits are stepped a few at a time and rounded at random, and compile.optimizer=true makes one "
        "graph of the whole step",
        instead=f"use precision=bf16, {_OFF}",
    ),
    Clash(
        slot="optimizer",
        name="adamw_8bit",
        why="it compiles its step by itself where that pays, and compile.optimizer=true would do so again",
        instead=f"use optimizer=adamw, {_OFF}",
    ),
)
GRAPHS = Clash(
    slot="activation_offload",
    name="cpu",
    why="CUDA graphs look for what backward needs at the addresses it had when they were recorded, and what comes back from "
    "the host lies elsewhere, so that they would be recorded again and again",
    instead="use compile.mode=null, or activation_checkpointing=full",
)


class _Compiled(Strategy):
    """What `blocks` and `model` have in common: everything but which forwards are compiled."""

    slot = "compile"
    Config = CompileConfig
    # What was compiled; None before the model is built.
    compiled: Compiled | None = None
    # What compilation did; made with the model.
    told: Report
    # Where compiled code comes from and stays; None with a backend that keeps nothing.
    kept: Kept | None = None
    # The comparison with eager code; None where there is none.
    reference: Reference | None = None
    # Where CUDA graphs may use their memory again; None without them.
    _generations: Generations | None = None
    _step: Any = 0
    _evaluated = False

    @classmethod
    def idle(cls, config: Any) -> tuple[str, ...]:
        """Lines that CUDA graphs alone need; the loss is compiled, and batches are padded, on wish."""
        graphs = makes_cuda_graphs(config.mode, config.backend)
        idle = () if graphs else ("microbatch", "forward")
        idle = idle if graphs or config.pad is not None else ("batch", *idle)
        return idle if config.loss else ("loss", *idle)

    @classmethod
    def limits(cls, config: Any) -> tuple[Clash, ...]:
        """What cannot be had together with a compiled step of the optimizer, or with CUDA graphs."""
        graphs = (GRAPHS,) if makes_cuda_graphs(config.mode, config.backend) else ()
        return (*cls.clashes, *(OPTIMIZER if config.optimizer else ()), *graphs)

    def model(self, model: Any) -> Any:
        """Compile forwards in place, after checkpointing and before ranks are joined."""
        config = self.config
        if self._with_graphs:
            self._generations = Generations()
            cuda_graphs.keep_outputs()
        if config.backend == "inductor":
            self.kept = Kept(
                self.context.device,
                cache=config.cache,
                project_dir=self.context.project_dir,
                artifacts=config.artifacts,
                writes=self.context.data_rank == 0,
            )
        self.compiled = compile_forwards(
            self.modules(model),
            backend=config.backend,
            mode=config.mode,
            fullgraph=config.fullgraph,
            dynamic=config.dynamic,
        )
        from fasttrain.compiler.report import Report

        self.told = Report(self.compiled.modules, config.strict, main=self.context.data_rank == 0)
        return model

    def loss(self, loss: Any) -> Any:
        """Compile the loss function."""
        config = self.config
        return compile_loss(loss, backend=config.backend, mode=config.mode, dynamic=config.dynamic)

    def apart(self) -> str | None:
        """A step in which something was compiled."""
        return "compilation" if self.told.stepped() else None

    def evaluated(self, figures: Mapping[str, float]) -> None:
        """What an evaluation compiled."""
        self.told.evaluated()

    def remarks(self) -> list[str]:
        """Breaks, what runs uncompiled, what is compiled again and again; whether it all pays, as rank 0 found."""
        told = self.told.remarks()
        if self.reference is None or self.context.data_rank:
            return told
        return [*told, *self.reference.remarks(self.told.all.seconds, broken=bool(self.told.all.breaks))]

    def summary(self) -> dict[str, Any]:
        """Graphs, breaks, recompilations, what runs uncompiled, seconds; what a forward and backward take either way."""
        return {**self.told.summary(), **({} if self.reference is None else self.reference.summary())}

    def notes(self) -> list[str]:
        """Where compiled code is kept, and whether there is any; why it is not compared with eager code."""
        kept = [] if self.kept is None else self.kept.notes()
        why = self._incomparable() if self.config.reference_steps else None
        return kept if why is None else [*kept, f"not compared with eager code: {why}"]

    def ended(self) -> None:
        """Put torch's own place back."""
        if self.kept is not None:
            self.kept.end()

    def modules(self, model: Any) -> list[Any]:
        """Whose forwards are compiled."""
        raise NotImplementedError

    @property
    def _with_graphs(self) -> bool:
        """Whether forwards become CUDA graphs."""
        made = makes_cuda_graphs(self.config.mode, self.config.backend)
        return made and self.context.device.type in cuda_graphs.DEVICES

    def started(self, model: Any, optimizer: Any, step: Any) -> None:
        """Where the run begins: what is left of it decides whether compiling pays. Compile the step of the optimizer."""
        self._step = step
        config = self.config
        if config.optimizer:
            compile_optimizer_step(optimizer, backend=config.backend, mode=config.mode, begun=int(step) > 0)
        if self._generations is not None:
            self._generations.gradients = Gradients(model.parameters())

    # ---- padding, and CUDA graphs

    def batch(self, batch: Any) -> Any:
        """Padded, in training and evaluation. Each batch of an evaluation begins a generation of CUDA graphs."""
        if self._generations is not None:
            self._generations.delivered()
        return batch if self.config.pad is None else pad_batch(batch, self.config.pad)

    def forward(self) -> AbstractContextManager[Any]:
        """The first forward of a microbatch begins one."""
        return NO_CONTEXT if self._generations is None else self._generations.forward()

    def microbatch(self, is_last: bool) -> AbstractContextManager[Any]:
        """Gradients leave the memory of the graphs where more of the step follow."""
        return NO_CONTEXT if self._generations is None else self._generations.microbatch(is_last)

    def evaluating(self, model: Any) -> AbstractContextManager[Any]:
        """An evaluation has no forward() around what it runs; at the end of the first, ranks wait for those that compile."""
        graphs = NO_CONTEXT if self._generations is None else self._generations.evaluating()
        if self._evaluated or self.context.data_ranks == 1:
            return graphs
        self._evaluated = True
        return FirstEvaluation(self.context, graphs)

    # ---- against eager code

    def around(self, gradients_of: Any) -> Any:
        """Before the first step: a microbatch of it, eagerly and compiled; then watch what is called in the step."""
        compared, watched = not self.config.reference_steps, False
        graphs = self._with_graphs

        def first_compared(task: Task, batch: Any) -> Any:
            nonlocal compared, watched
            try:
                if not compared:
                    compared = self._compare(task, batch)
                if not watched:
                    watched = True
                    compile_together(task, self.lines, self.context, batch)
                    self.told.watch_calls()
                loss = gradients_of(task, batch)
            except Exception as error:
                if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                    error.add_note(self._guide())
                raise
            # A loss that a graph computed would be written over by the next step, while the run still holds it.
            return loss if not graphs or loss is None else loss.clone()

        return first_compared

    def _guide(self) -> str:
        """What to do where the compiler fails."""
        cache = None if self.kept is None else self.kept.cache
        kept = "" if cache is None else f" What was compiled is kept in {cache.path}, which can be deleted at any time."
        return f"compile={self.name} failed; to train without it: {self.slot}=null.{kept}"

    def _compare(self, task: Task, batch: Any) -> bool:
        """Compare, and whether that is done with. Nothing of the run moves."""
        context, lines = self.context, self.lines
        if self.compiled is None or context.undisturbed is None or self._incomparable() is not None:
            return True
        with context.undisturbed():
            microbatches = lines.split(task, batch)
            microbatch = next((piece for piece in microbatches if holds_samples(piece)), None)
            if microbatch is None:
                return False  # this rank has no part in this step

            run = trial(task, lines, microbatch)
            reference = Reference(
                steps=self.config.reference_steps, off=f"{self.slot}=null", total_steps=context.total_steps
            )
            reference.calls, reference.step = len(microbatches), int(self._step)
            # CUDA graphs are warmed up in the first call, recorded in the second, and replayed from the third on.
            calls = 3 if self._with_graphs else 1
            from fasttrain.compiler.record import Record

            record = Record()
            reference.measure(
                run,
                self.compiled.eager,
                context.device,
                compiling_calls=calls,
                compiled_anew=lambda: record.take() is not None,
            )
            self.reference = reference
        return True

    def _incomparable(self) -> str | None:
        """Why eager code cannot stand beside compiled code here, if so."""
        names = {slot: strategy.name for slot, strategy in self.lines.strategies.items()}
        if names.get("activation_checkpointing") == "budget":
            return "activation_checkpointing=budget saves memory in compiled code alone"
        spread = [f"{slot}={names[slot]}" for slot in SPREADS if names.get(slot, "ddp") != "ddp"]
        if spread:
            return f"forwards and backwards of ranks wait for each other with {', '.join(spread)}"
        waiting = [f"{s.slot}={s.name}" for s in self.lines.strategies.values() if s.forwards_together]
        if waiting and self.context.data_ranks > 1:
            return f"forwards of ranks wait for each other with {', '.join(waiting)}"
        return None


@final
class Blocks(_Compiled):
    """Compile each repeated block: one graph a kind of block, whatever the depth."""

    name = "blocks"

    def modules(self, model: Any) -> list[Any]:
        """The blocks, as the trainer names them or as they are found."""
        try:
            return self.context.blocks(model, "compile=blocks")
        except ConfigError as error:
            raise ConfigError(f"{str(error).rstrip('.')}; or compile=model, which needs none.") from error


@final
class Model(_Compiled):
    """Compile the forward of the whole model: more is fused, and the time to compile grows with the depth."""

    name = "model"

    def modules(self, model: Any) -> list[Any]:
        """The model."""
        return [model]
