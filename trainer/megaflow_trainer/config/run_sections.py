"""The sections about the run itself: where it is kept, what is written down, and what watches over it."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow_trainer.config.limits import at_least, one_of, raise_faults


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where the run is saved and from where it goes on."""

    save: str | None = None
    """Folder for checkpoints. A restart goes on from the last complete one in it."""
    load: str | None = None
    """Folder to start from when `save` holds no complete checkpoint yet."""
    init_from: str | None = None
    """Checkpoint (Megatron-Core's too) or Hugging Face folder whose weights a fresh run starts with; nothing else is
    taken from it."""
    grow: bool = False
    """Whether layers, tokens and positions that `init_from` does not have keep their initial weights."""
    every: int | None = None
    """Iterations between two checkpoints (only at the end if not given)."""
    is_async: bool = True
    """Whether training goes on while a checkpoint is written."""
    keep_last: int = 0
    """Checkpoints that are kept, the newest; 0 keeps all."""
    keep_every: int = 0
    """Checkpoints of iterations divisible by this are kept whatever `keep_last` says; 0 for none."""
    is_finetune: bool = False
    """Whether only the weights of `load` are taken: iteration, optimizer, random streams and data begin anew."""
    loads_optimizer: bool = True
    """Whether the optimizer's states and the loss scale are taken from the checkpoint."""
    loads_rng: bool = True
    """Whether the random streams of dropout are taken from the checkpoint."""
    schedule_from: str = "both"
    """Whose learning-rate and weight-decay schedule holds after a resume: command, checkpoint, or both (a difference
    is an error)."""

    def __post_init__(self) -> None:
        raise_faults(
            at_least("checkpoint", 1, every=self.every)
            + at_least("checkpoint", 0, keep_last=self.keep_last, keep_every=self.keep_every)
            + one_of("checkpoint", ("command", "checkpoint", "both"), schedule_from=self.schedule_from)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is written down, and where."""

    every: int = 10
    """Iterations between two log lines."""
    run_dir: str | None = None
    """Folder for run.json and metrics.jsonl (the checkpoint folder, else runs/NAME, if not given)."""
    name: str = "gpt"
    """Name of the run."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard (off if not given)."""
    wandb_project: str | None = None
    """Project of Weights & Biases (off if not given); needs the package wandb."""
    wandb_entity: str | None = None
    """Team or user of Weights & Biases (the account's own if not given)."""
    is_profiled: bool = False
    """Whether some steps are profiled: a Chrome trace and a table in the run folder."""
    profile_start: int = 10
    """First iteration that is profiled."""
    profile_end: int = 12
    """Last iteration that is profiled."""
    profile_ranks: tuple[str, ...] = ("0",)
    """Ranks that are profiled."""
    profiles_kernels_only: bool = False
    """Whether a profile on a GPU traces kernels alone: operations and phases on the host, which it traces otherwise,
    slow a step."""

    def __post_init__(self) -> None:
        others = [
            f"log.profile_ranks takes whole numbers, got {rank!r}" for rank in self.profile_ranks if not _is_rank(rank)
        ]
        raise_faults(
            at_least("log", 1, every=self.every, profile_start=self.profile_start)
            + at_least("log", self.profile_start, profile_end=self.profile_end)
            + others
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What watches over the run."""

    max_bad_steps: int = 5
    """Iterations in a row whose loss or gradient is not finite, after which the run stops; each is skipped."""
    spike_threshold: float = 8.0
    """A loss this many usual deviations above the median is a spike, told with its documents; 0: off."""
    spike_window: int = 64
    """Iterations from which the usual loss and its deviation are taken."""
    exit_minutes: float | None = None
    """Minutes after which the run saves a checkpoint and ends, to be started again (no limit if not given)."""
    exit_every: int | None = None
    """The run saves a checkpoint and ends at iterations divisible by this, to be started again."""
    hang_s: float = 1800.0
    """Seconds without progress after which every rank writes where it stands and ends; 0: never."""
    straggler_ratio: float = 1.3
    """A rank that computes this many times longer than the others' median is told; 0: off."""

    def __post_init__(self) -> None:
        raise_faults(
            at_least("guard", 1, max_bad_steps=self.max_bad_steps)
            + at_least("guard", 16, spike_window=self.spike_window)
            + at_least("guard", 0, spike_threshold=self.spike_threshold, exit_minutes=self.exit_minutes)
            + at_least("guard", 1, exit_every=self.exit_every)
            + at_least("guard", 0, hang_s=self.hang_s, straggler_ratio=self.straggler_ratio)
        )


def _is_rank(word: str) -> bool:
    return word.isascii() and word.isdigit()
