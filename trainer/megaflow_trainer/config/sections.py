"""The sections of a run's configuration: what each field means, and the limits it has by itself.

Rules that need two sections are in `checks.py`; how flags and recipes fill these fields is in `flags.py` and
`recipe.py`. A field that is None is derived by `resolve.py` from the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megaflow_trainer.config.kernel_section import KernelConfig
from megaflow_trainer.config.limits import (
    MOST_BATCH,
    MOST_HELD,
    MOST_MICRO,
    MOST_THREADS,
    MOST_TOKENS,
    at_least,
    at_most,
    fraction,
    one_of,
    raise_faults,
)
from megaflow_trainer.config.model_section import ModelConfig
from megaflow_trainer.config.precision_section import PrecisionConfig
from megaflow_trainer.config.run_sections import CheckpointConfig, GuardConfig, LogConfig
from megaflow_trainer.config.samples_section import SampleConfig

__all__ = [
    "BatchSizes",
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "GuardConfig",
    "KernelConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "SampleConfig",
    "ScheduleConfig",
    "StepConfig",
    "TrainConfig",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where samples come from and how they are cut."""

    path: tuple[str, ...] = ()
    """Prefix of a .bin/.idx pair; P also finds P_text_document. Several prefixes, or weight prefix weight prefix ...,
    make a blend. Or text (Parquet, Arrow, JSON lines; files, folders, patterns, URLs), tokenized while it trains."""
    train_path: tuple[str, ...] = ()
    """The same for the train part alone; instead of a path and a split."""
    valid_path: tuple[str, ...] = ()
    """The same for the valid part alone."""
    test_path: tuple[str, ...] = ()
    """The same for the test part alone."""
    args_path: str | None = None
    """File that holds what --data-path would."""
    per_split_args_path: str | None = None
    """JSON file that holds train, valid and test."""
    is_mock: bool = False
    """Whether made-up data are read: a run without any data."""
    split: str = "969,30,1"
    """Weights of the train, valid and test parts."""
    seq_len: int = 1024
    """Tokens of a sample."""
    tokenizer_type: str | None = None
    """Tokenizer of the data, compared with what the data says of itself."""
    tokenizer_model: str | None = None
    """A tokenizer.json, or the folder with one."""
    vocab_file: str | None = None
    """Vocabulary of a GPT-2 style tokenizer (JSON, whatever its name)."""
    merge_file: str | None = None
    """Merges of a GPT-2 style tokenizer."""
    order: str = "single"
    """Sampler: single walks the samples as the dataset orders them; cyclic draws them in an order of its own."""
    num_threads: int = 1
    """Threads that gather batches ahead of need; 0 gathers each batch when it is asked for."""
    prefetch: int = 4
    """Micro-batches held ready ahead of need."""
    keeps_documents_apart: bool = False
    """Whether tokens see those of their own document only, and positions begin again with each: as both --reset flags,
    but by the documents of the data, which need no end-of-document token."""
    eod_mask_loss: bool = False
    """Whether predictions made at an end-of-document token are left out of the loss."""

    def __post_init__(self) -> None:
        raise_faults(
            at_least("data", 1, seq_len=self.seq_len, prefetch=self.prefetch)
            + at_least("data", 0, num_threads=self.num_threads)
            + at_most("data", MOST_THREADS, "lower it", num_threads=self.num_threads)
            + at_most("data", MOST_TOKENS, "lower it", seq_len=self.seq_len)
            + at_most("data", MOST_HELD, "lower it", prefetch=self.prefetch)
            + one_of("data", ("single", "cyclic"), order=self.order)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many ranks share what; the rest of the world is data parallel."""

    tp: int = 1
    """Tensor-parallel size: ranks that share one layer."""
    pp: int = 1
    """Pipeline-parallel size: stages the layers are divided into."""
    cp: int = 1
    """Context-parallel size: ranks that share one sequence."""
    cp_kind: str = "p2p"
    """How attention sees the tokens of other ranks: p2p (a ring), all_gather or a2a (Ulysses)."""
    ep: int = 1
    """Expert-parallel size: ranks that share the experts of a layer. They are ranks of one stage, whatever other axes
    they are on."""
    etp: int | None = None
    """Expert-tensor-parallel size: ranks that share one expert (as many as share other layers if not given)."""
    dispatcher: str = "alltoall"
    """How tokens reach their experts on other ranks: alltoall (each row to its ranks) or allgather (all to all)."""
    overlaps_shared: bool = False
    """Whether the expert that every token passes is computed while tokens travel."""
    sequence_parallel: bool = False
    """Whether norms and dropouts are split along the sequence over the tensor-parallel ranks."""
    schedule: str = "1f1b"
    """Order of a pipeline's micro-batches: gpipe, 1f1b, interleaved, zero_bubble or zbv."""
    virtual_stages: int = 1
    """Chunks of the model that each pipeline rank holds, for interleaved and zero_bubble; zbv has 2."""
    stage_layout: str | None = None
    """What each chunk holds, in Megatron's notation such as Et*3|t*4|t*3L (even, the ends with less, if not given)."""
    zero: int = 0
    """What data-parallel ranks divide among them: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
    dp_replicate: int = 1
    """Copies of what ZeRO divides: each is divided among data-parallel ranks / copies."""
    bucket_size: int = 40_000_000
    """Gradients that data-parallel ranks send at once."""
    overlaps: bool = True
    """Whether ranks compute while they send: gradients during backward, weights that ZeRO divides during the next
    forward, and what tensor-parallel ranks exchange in backward during products."""
    backend: str | None = None
    """Process group backend: nccl or gloo. The first that fits if not given; gloo keeps the run on the CPU."""

    def __post_init__(self) -> None:
        raise_faults(
            at_least("parallel", 1, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, dp_replicate=self.dp_replicate)
            + at_least("parallel", 1, etp=self.etp)
            + at_least("parallel", 0, zero=self.zero)
            + at_least("parallel", 1, bucket_size=self.bucket_size)
            + ([f"parallel.zero must be 0, 1, 2 or 3, got {self.zero}"] if self.zero > 3 else [])
            + at_least("parallel", 1, virtual_stages=self.virtual_stages)
            + one_of("parallel", ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"), schedule=self.schedule)
            + one_of("parallel", ("p2p", "all_gather", "a2a"), cp_kind=self.cp_kind)
            + one_of("parallel", ("nccl", "gloo"), backend=self.backend)
            + one_of("parallel", ("alltoall", "allgather"), dispatcher=self.dispatcher)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimizer, its states and clipping."""

    kind: str = "adamw"
    """adamw, lion, sgd or muon (matrices inside the blocks by Muon, the rest by AdamW)."""
    lr: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices and embeddings; biases and norms are not decayed."""
    start_weight_decay: float | None = None
    """Weight decay at the start of the run (weight decay if not given)."""
    end_weight_decay: float | None = None
    """Weight decay at the end of the run (weight decay if not given)."""
    decay_style: str = "constant"
    """How weight decay goes from start to end: constant (the end's), linear or cosine."""
    no_decay: tuple[str, ...] = ()
    """Weights that are not decayed either, by name with wildcards: embedding.weight, blocks.*.mlp.*."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Momentum of sgd."""
    muon_momentum: float = 0.95
    """Momentum of muon."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    main_dtype: str = "fp32"
    """Master weights that are stepped: fp32 or bf16."""
    main_grad_dtype: str = "fp32"
    """Gradients as they are accumulated and reduced: fp32 or bf16."""
    exp_avg_dtype: str = "fp32"
    """First moment or momentum: fp32, bf16 or fp16."""
    exp_avg_sq_dtype: str = "fp32"
    """Second moment: fp32, bf16 or fp16."""
    is_offloaded: bool = False
    """Whether master weights and states lie in the CPU's memory and are stepped there."""
    is_fused: bool = True
    """Whether AdamW clips, moves and rounds all weights in one pass, on GPUs with Triton."""

    def __post_init__(self) -> None:
        raise_faults(
            one_of("optim", ("adamw", "adam", "lion", "sgd", "muon"), kind=self.kind)
            + one_of("optim", ("constant", "linear", "cosine"), decay_style=self.decay_style)
            + one_of("optim", ("fp32", "bf16"), main_dtype=self.main_dtype, main_grad_dtype=self.main_grad_dtype)
            + one_of("optim", ("fp32", "bf16", "fp16"), exp_avg_dtype=self.exp_avg_dtype)
            + one_of("optim", ("fp32", "bf16", "fp16"), exp_avg_sq_dtype=self.exp_avg_sq_dtype)
            + at_least("optim", 0, lr=self.lr, weight_decay=self.weight_decay)
            + at_least("optim", 0, start_weight_decay=self.start_weight_decay)
            + at_least("optim", 0, end_weight_decay=self.end_weight_decay)
            + at_least("optim", 0, adam_eps=self.adam_eps, clip_grad=self.clip_grad)
            + fraction("optim", adam_beta1=self.adam_beta1, adam_beta2=self.adam_beta2)
            + fraction("optim", sgd_momentum=self.sgd_momentum, muon_momentum=self.muon_momentum)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over the run: warm-up, then decay from the peak to `min_lr`."""

    style: str = "linear"
    """Decay after warm-up: cosine, linear, constant, inverse-square-root or WSD (constant, then a decay at the end)."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay and after it."""
    decay_steps: int | None = None
    """Iterations until `min_lr` is reached, warm-up included (the whole run if not given)."""
    decay_samples: int | None = None
    """The same in samples."""
    warmup_steps: int | None = None
    """Iterations of linear warm-up."""
    warmup_samples: int | None = None
    """The same in samples."""
    warmup_fraction: float | None = None
    """The same as a fraction of the decay."""
    warmup_init: float = 0.0
    """Learning rate from which warm-up starts."""
    wsd_steps: int | None = None
    """Iterations of the decay at the end of WSD (a tenth of the decay if not given)."""
    wsd_samples: int | None = None
    """The same in samples."""
    wsd_style: str = "exponential"
    """Its shape: exponential, linear, cosine or minus_sqrt."""

    def __post_init__(self) -> None:
        raise_faults(
            one_of("schedule", ("cosine", "linear", "constant", "inverse-square-root", "WSD"), style=self.style)
            + one_of("schedule", ("exponential", "linear", "cosine", "minus_sqrt"), wsd_style=self.wsd_style)
            + at_least("schedule", 1, wsd_steps=self.wsd_steps, wsd_samples=self.wsd_samples)
            + at_least("schedule", 0, min_lr=self.min_lr, warmup_init=self.warmup_init)
            + at_least("schedule", 1, decay_steps=self.decay_steps, decay_samples=self.decay_samples)
            + at_least("schedule", 0, warmup_steps=self.warmup_steps, warmup_samples=self.warmup_samples)
            + fraction("schedule", warmup_fraction=self.warmup_fraction)
        )


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The three sizes of a step, in agreement."""

    micro_batch_size: int
    global_batch_size: int
    num_micro_batches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """One step: global batch = micro batch x data-parallel ranks x accumulation. Give any part; the rest follows."""

    micro_batch_size: int | None = None
    """Samples in one forward of one data-parallel rank."""
    global_batch_size: int | None = None
    """Samples of one step over all ranks."""
    num_micro_batches: int | None = None
    """Micro-batches accumulated in one step."""
    ramp_up: tuple[str, ...] = ()
    """Global batch at the start, its increment, and the samples over which it grows to the full one."""
    dtype: str = "fp32"
    """Weights and activations: fp32, bf16, fp16 or fp64. Master weights, gradients and moments are fp32 unless asked
    otherwise (fp64 in fp64, which is for comparisons)."""
    is_all_bf16: bool = False
    """Whether master weights, gradients and moments are bf16 too: half the memory, small updates are lost."""
    fp8: str = "none"
    """8-bit matrix products: none, hybrid (e4m3 forward, e5m2 for gradients) or e4m3."""
    allows_tf32: bool = False
    """Whether products of fp32 matrices may use TF32 on GPUs that have it: faster, 10 bits of mantissa."""
    is_compiled: bool | None = None
    """Whether every block is compiled by torch.compile: the first step takes longer, all others less (on GPUs, wherever
    it can be, if not given)."""
    cuda_graph: str = "none"
    """Whether forward and backward of a micro-batch are one CUDA graph, for models so small that the host is the
    bottleneck: none or local."""
    graph_warmup: int = 3
    """Micro-batches that run as they are before one is recorded as a CUDA graph."""
    accumulates_in_products: bool = True
    """Whether matrix products add weights' gradients to the fp32 main gradients themselves, on GPUs."""
    loss_scale: float | None = None
    """Static loss scale of fp16 (dynamic if not given)."""
    initial_loss_scale: float = 2.0**32
    """Dynamic loss scale of the first step."""
    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: int = 1000
    """Good steps in a row after which the scale is doubled."""
    hysteresis: int = 2
    """Overflows after which the scale is halved."""

    def __post_init__(self) -> None:
        raise_faults(
            at_least("step", 1, micro_batch_size=self.micro_batch_size, global_batch_size=self.global_batch_size)
            + at_least("step", 1, num_micro_batches=self.num_micro_batches)
            + at_most("step", MOST_MICRO, "lower it", micro_batch_size=self.micro_batch_size)
            + at_most("step", MOST_BATCH, "lower it", global_batch_size=self.global_batch_size)
            + at_most("step", MOST_BATCH, "lower it", num_micro_batches=self.num_micro_batches)
            + one_of("step", ("fp32", "bf16", "fp16", "fp64"), dtype=self.dtype)
            + one_of("step", ("none", "hybrid", "e4m3"), fp8=self.fp8)
            + one_of("step", ("none", "local"), cuda_graph=self.cuda_graph)
            + at_least("step", 1, graph_warmup=self.graph_warmup)
            + at_least("step", 1, loss_scale=self.loss_scale, initial_loss_scale=self.initial_loss_scale)
            + at_least("step", 1, min_loss_scale=self.min_loss_scale, hysteresis=self.hysteresis)
            + at_least("step", 1, loss_scale_window=self.loss_scale_window)
        )

    @property
    def sizes(self) -> BatchSizes:
        """The sizes of a resolved configuration."""
        assert self.micro_batch_size and self.global_batch_size and self.num_micro_batches, "not resolved"  # noqa: PT018
        return BatchSizes(self.micro_batch_size, self.global_batch_size, self.num_micro_batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeConfig:
    """What is computed again in backward instead of being kept, and how the rest is kept."""

    granularity: str = "none"
    """none, selective (parts of every block) or full (whole blocks)."""
    method: str | None = None
    """Which blocks full recompute takes: uniform (every run of num_layers) or block (the first num_layers); uniform if
    not given."""
    num_layers: int | None = None
    """Blocks in a run of uniform (1 if not given), or blocks that are computed again (all if not given)."""
    modules: tuple[str, ...] = ()
    """Parts that selective recompute takes: attention, mlp, attention_norm, mlp_norm, attention_core (softmax and its
    products) or mlp_activation; attention if neither parts nor a budget are given."""
    budget: float | None = None
    """Part of the blocks' forward FLOPs that selective recompute may spend: it takes parts by bytes saved per FLOP
    (by name if not given)."""
    compression: str = "none"
    """How activations are kept for backward: none (as they are), bf16 or fp8. Gradients change a little."""
    is_offloaded: bool = False
    """Whether activations wait for backward in the CPU's memory."""

    def __post_init__(self) -> None:
        known = ("attention", "mlp", "attention_norm", "mlp_norm", "attention_core", "mlp_activation")
        others = [name for name in self.modules if name not in known]
        raise_faults(
            one_of("recompute", ("none", "selective", "full"), granularity=self.granularity)
            + one_of("recompute", ("uniform", "block"), method=self.method)
            + one_of("recompute", ("none", "bf16", "fp8"), compression=self.compression)
            + at_least("recompute", 1, num_layers=self.num_layers)
            + at_least("recompute", 0, budget=self.budget)
            + [f"recompute.modules must be among {', '.join(known)}, got {name!r}" for name in others]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Validation during the run."""

    every: int = 1000
    """Iterations between two evaluations; 0 turns them off."""
    steps: int = 100
    """Global batches of one evaluation; each evaluation reads the same ones; 0 turns them off, too."""

    def __post_init__(self) -> None:
        raise_faults(at_least("eval", 0, every=self.every, steps=self.steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A whole run."""

    num_steps: int | None = None
    """Iterations of the run."""
    num_samples: int | None = None
    """The same in samples; rounded down to whole iterations."""
    seed: int = 1234
    """Decides initial weights, dropout and the order of samples."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    samples: SampleConfig = field(default_factory=SampleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    step: StepConfig = field(default_factory=StepConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be >= 1, got {value}"
            for name, value in (("num_steps", self.num_steps), ("num_samples", self.num_samples))
            if value is not None and value < 1
        ]
        if not 0 <= self.seed < 2**32:
            faults.append(f"seed must be in [0, 2^32), got {self.seed}")
        raise_faults(faults)

    @property
    def last_step(self) -> int:
        """The length of a resolved run."""
        assert self.num_steps is not None, "not resolved"
        return self.num_steps
