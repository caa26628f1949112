"""The sections of a run's configuration: what each field means, and the limits it has by itself.

Rules that need two sections are in `checks.py`; how flags and recipes fill these fields is in `flags.py` and
`recipe.py`. A field that is None is derived by `resolve.py` from the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megaflow.errors import ConfigError


def _raise_faults(faults: list[str]) -> None:
    """Raise one ConfigError that lists every fault, one a line."""
    if faults:
        raise ConfigError("\n".join(faults))


def _at_least(section: str, least: float, **values: float | None) -> list[str]:
    """Faults of the given fields that are below `least`; None (to be derived) passes."""
    return [
        f"{section}.{name} must be >= {least}, got {value}"
        for name, value in values.items()
        if value is not None and not value >= least
    ]


def _fraction(section: str, **values: float | None) -> list[str]:
    """Faults of the given fields that are outside [0, 1)."""
    return [
        f"{section}.{name} must be in [0, 1), got {value}"
        for name, value in values.items()
        if value is not None and not 0 <= value < 1
    ]


def _one_of(section: str, known: tuple[str, ...], **values: str | None) -> list[str]:
    """Faults of the given fields whose value is not one of `known`."""
    return [
        f"{section}.{name} must be one of {', '.join(known)}, got {value!r}"
        for name, value in values.items()
        if value is not None and value not in known
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and initialisation of the GPT; the defaults are GPT-2 small."""

    preset: str | None = None
    """A published shape, such as gpt2_small or llama3_8b; other flags override its fields."""
    num_layers: int = 12
    """Transformer blocks."""
    hidden_dim: int = 768
    """Width of the residual stream."""
    num_heads: int = 12
    """Attention heads; must divide the hidden size."""
    head_dim: int | None = None
    """Width of one head (hidden size / heads if not given)."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by a group of query heads (one for each query head if not given)."""
    ffn_dim: int | None = None
    """Width inside the MLP (4 x hidden size if not given; two thirds of it with SwiGLU, a multiple of 64)."""
    activation: str = "gelu"
    """MLP: gelu (tanh form), swiglu or squared_relu."""
    norm: str = "LayerNorm"
    """Normalisation: LayerNorm or RMSNorm."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before attention."""
    linear_bias: bool = True
    """Whether linear layers have biases."""
    qkv_bias: bool | None = None
    """Whether the projection to queries, keys and values has a bias (like the other layers if not given)."""
    position_kind: str = "learned_absolute"
    """How a token knows its place: learned_absolute, rope or none."""
    max_positions: int | None = None
    """Longest sequence; rows of the learned position table (the sequence length if not given)."""
    rotary_base: float = 10000.0
    """Base of the rotary angles."""
    rotary_fraction: float = 1.0
    """Part of a head that is rotated, from its start."""
    rotary_interleaved: bool = False
    """Pairing of rotated channels: neighbours (2i, 2i + 1); otherwise halves (i, i + d/2), as in Llama checkpoints."""
    rotary_scaling: str = "none"
    """Stretching of rotary positions: none, linear, ntk, llama3 or yarn."""
    rotary_factor: float = 1.0
    """How many times longer the sequence may become by rotary scaling."""
    rotary_original_positions: int | None = None
    """Longest sequence before rotary scaling (max positions / factor if not given)."""
    window: int | None = None
    """Each token attends to this many last tokens, itself included (all if not given)."""
    is_latent: bool = False
    """Multi-latent attention: keys and values are made from one narrow vector a token."""
    q_latent_dim: int | None = None
    """Width of the latent vector of queries (queries are made directly if not given)."""
    kv_latent_dim: int = 512
    """Width of the latent vector of keys and values."""
    qk_dim: int = 128
    """Part of a latent head that is not rotated."""
    qk_rotary_dim: int = 64
    """Part of a latent head that is rotated; one key part serves all heads."""
    v_dim: int = 128
    """Width of the values of a latent head."""
    num_mtp_layers: int = 0
    """Extra blocks that predict the tokens after the next one (multi-token prediction)."""
    mtp_loss_scale: float = 0.1
    """Weight of their mean loss. It enters the gradient and not the logged loss."""
    vocab_size: int | None = None
    """Tokens the model predicts (that of the data's tokenizer if not given)."""
    vocab_multiple: int = 128
    """The embedding is padded to a multiple of this; padded rows never enter the loss."""
    tied_embeddings: bool = True
    """Whether the output projection is the token embedding."""
    hidden_dropout: float = 0.1
    """Dropout after the embedding, the attention projection and the MLP."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""
    init_std: float = 0.02
    """Standard deviation of initial weights; those that write into the residual stream get init_std / sqrt(2 L)."""
    is_output_scaled: bool = True
    """Whether they do; otherwise all matrices get init_std."""
    mup_base_dim: int | None = None
    """Hidden size at which init_std and the learning rate were tuned: mu-P scales both for this one, which is wider by
    more heads of the same width (off if not given)."""
    norm_eps: float = 1e-5
    """Added to the variance in a norm."""
    attention: str = "auto"
    """Attention kernel: auto, sdpa, flash or math."""

    def __post_init__(self) -> None:
        _raise_faults(
            _at_least("model", 1, num_layers=self.num_layers, hidden_dim=self.hidden_dim, num_heads=self.num_heads)
            + _at_least("model", 1, ffn_dim=self.ffn_dim, max_positions=self.max_positions, window=self.window)
            + _at_least("model", 1, head_dim=self.head_dim, num_kv_heads=self.num_kv_heads)
            + _at_least("model", 1, q_latent_dim=self.q_latent_dim, kv_latent_dim=self.kv_latent_dim)
            + _at_least("model", 1, qk_dim=self.qk_dim, v_dim=self.v_dim, mup_base_dim=self.mup_base_dim)
            + _at_least("model", 2, qk_rotary_dim=self.qk_rotary_dim)
            + _at_least("model", 0, num_mtp_layers=self.num_mtp_layers, mtp_loss_scale=self.mtp_loss_scale)
            + _one_of("model", ("gelu", "swiglu", "squared_relu"), activation=self.activation)
            + _one_of("model", ("LayerNorm", "RMSNorm"), norm=self.norm)
            + _one_of("model", ("learned_absolute", "rope", "none"), position_kind=self.position_kind)
            + _one_of("model", ("none", "linear", "ntk", "llama3", "yarn"), rotary_scaling=self.rotary_scaling)
            + _at_least("model", 1, rotary_base=self.rotary_base, rotary_factor=self.rotary_factor)
            + _at_least("model", 1, rotary_original_positions=self.rotary_original_positions)
            + _at_least("model", 0, rotary_fraction=self.rotary_fraction)
            + _at_least("model", 2, vocab_size=self.vocab_size)
            + _at_least("model", 1, vocab_multiple=self.vocab_multiple)
            + _at_least("model", 0, init_std=self.init_std, norm_eps=self.norm_eps)
            + _fraction("model", hidden_dropout=self.hidden_dropout, attention_dropout=self.attention_dropout)
        )

    @property
    def head_width(self) -> int:
        """Width of one head of queries and keys."""
        return self.head_dim or self.hidden_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def ffn_width(self) -> int:
        """Width inside the MLP."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return 8 * self.hidden_dim // 3 // 64 * 64 or 64 if self.activation == "swiglu" else 4 * self.hidden_dim

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values get biases."""
        return self.linear_bias if self.qkv_bias is None else self.qkv_bias

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated; 0 without rotary positions."""
        if self.position_kind != "rope":
            return 0
        return self.qk_rotary_dim if self.is_latent else int(self.head_width * self.rotary_fraction) // 2 * 2

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding: the vocabulary rounded up to `vocab_multiple`."""
        assert self.vocab_size is not None, "known once the data are open"
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where samples come from and how they are cut."""

    path: tuple[str, ...] = ()
    """Prefix of a .bin/.idx pair; P also finds P_text_document."""
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
    """Sampler: single or cyclic. Samples are already shuffled and repeated, so both read the same order."""
    num_threads: int = 1
    """Threads that gather batches ahead of need; 0 gathers each batch when it is asked for."""
    prefetch: int = 4
    """Micro-batches held ready ahead of need."""
    eod_mask_loss: bool = False
    """Whether predictions made at an end-of-document token are left out of the loss."""

    def __post_init__(self) -> None:
        _raise_faults(
            _at_least("data", 1, seq_len=self.seq_len, prefetch=self.prefetch)
            + _at_least("data", 0, num_threads=self.num_threads)
            + _one_of("data", ("single", "cyclic"), order=self.order)
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
    ep: int = 1
    """Expert-parallel size: ranks that share the experts of a layer."""
    sequence_parallel: bool = False
    """Whether norms and dropouts are split along the sequence over the tensor-parallel ranks."""
    backend: str | None = None
    """Process group backend: nccl or gloo. The first that fits if not given; gloo keeps the run on the CPU."""

    def __post_init__(self) -> None:
        _raise_faults(
            _at_least("parallel", 1, tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep)
            + _one_of("parallel", ("nccl", "gloo"), backend=self.backend)
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

    def __post_init__(self) -> None:
        _raise_faults(
            _one_of("optim", ("adamw", "adam", "lion", "sgd", "muon"), kind=self.kind)
            + _one_of("optim", ("constant", "linear", "cosine"), decay_style=self.decay_style)
            + _one_of("optim", ("fp32", "bf16"), main_dtype=self.main_dtype, main_grad_dtype=self.main_grad_dtype)
            + _one_of("optim", ("fp32", "bf16", "fp16"), exp_avg_dtype=self.exp_avg_dtype)
            + _one_of("optim", ("fp32", "bf16", "fp16"), exp_avg_sq_dtype=self.exp_avg_sq_dtype)
            + _at_least("optim", 0, lr=self.lr, weight_decay=self.weight_decay)
            + _at_least("optim", 0, start_weight_decay=self.start_weight_decay)
            + _at_least("optim", 0, end_weight_decay=self.end_weight_decay)
            + _at_least("optim", 0, adam_eps=self.adam_eps, clip_grad=self.clip_grad)
            + _fraction("optim", adam_beta1=self.adam_beta1, adam_beta2=self.adam_beta2)
            + _fraction("optim", sgd_momentum=self.sgd_momentum, muon_momentum=self.muon_momentum)
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
        _raise_faults(
            _one_of("schedule", ("cosine", "linear", "constant", "inverse-square-root", "WSD"), style=self.style)
            + _one_of("schedule", ("exponential", "linear", "cosine", "minus_sqrt"), wsd_style=self.wsd_style)
            + _at_least("schedule", 1, wsd_steps=self.wsd_steps, wsd_samples=self.wsd_samples)
            + _at_least("schedule", 0, min_lr=self.min_lr, warmup_init=self.warmup_init)
            + _at_least("schedule", 1, decay_steps=self.decay_steps, decay_samples=self.decay_samples)
            + _at_least("schedule", 0, warmup_steps=self.warmup_steps, warmup_samples=self.warmup_samples)
            + _fraction("schedule", warmup_fraction=self.warmup_fraction)
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
    allows_tf32: bool = False
    """Whether products of fp32 matrices may use TF32 on GPUs that have it: faster, 10 bits of mantissa."""
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
        _raise_faults(
            _at_least("step", 1, micro_batch_size=self.micro_batch_size, global_batch_size=self.global_batch_size)
            + _at_least("step", 1, num_micro_batches=self.num_micro_batches)
            + _one_of("step", ("fp32", "bf16", "fp16", "fp64"), dtype=self.dtype)
            + _at_least("step", 1, loss_scale=self.loss_scale, initial_loss_scale=self.initial_loss_scale)
            + _at_least("step", 1, min_loss_scale=self.min_loss_scale, hysteresis=self.hysteresis)
            + _at_least("step", 1, loss_scale_window=self.loss_scale_window)
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
    modules: tuple[str, ...] = ("attention",)
    """Parts that selective recompute takes: attention, mlp, attention_norm, mlp_norm."""
    compression: str = "none"
    """How activations are kept for backward: none (as they are), bf16 or fp8. Gradients change a little."""
    is_offloaded: bool = False
    """Whether activations wait for backward in the CPU's memory."""

    def __post_init__(self) -> None:
        known = ("attention", "mlp", "attention_norm", "mlp_norm")
        others = [name for name in self.modules if name not in known]
        _raise_faults(
            _one_of("recompute", ("none", "selective", "full"), granularity=self.granularity)
            + _one_of("recompute", ("uniform", "block"), method=self.method)
            + _one_of("recompute", ("none", "bf16", "fp8"), compression=self.compression)
            + _at_least("recompute", 1, num_layers=self.num_layers)
            + [f"recompute.modules must be among {', '.join(known)}, got {name!r}" for name in others]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Validation during the run."""

    every: int = 1000
    """Iterations between two evaluations; 0 turns them off."""
    steps: int = 100
    """Global batches of one evaluation; each evaluation reads the same ones."""

    def __post_init__(self) -> None:
        _raise_faults(_at_least("eval", 0, every=self.every, steps=self.steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where the run is saved and from where it goes on."""

    save: str | None = None
    """Folder for checkpoints. A restart goes on from the last complete one in it."""
    load: str | None = None
    """Folder to start from when `save` holds no complete checkpoint yet."""
    init_from: str | None = None
    """Checkpoint or Hugging Face folder whose weights a fresh run starts with; nothing else is taken from it."""
    grow: bool = False
    """Whether layers, tokens and positions that `init_from` does not have keep their initial weights."""
    every: int | None = None
    """Iterations between two checkpoints (only at the end if not given)."""

    def __post_init__(self) -> None:
        _raise_faults(_at_least("checkpoint", 1, every=self.every))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is written down, and where."""

    every: int = 10
    """Iterations between two log lines."""
    run_dir: str | None = None
    """Folder for run.json and metrics.jsonl (the checkpoint folder, else runs/NAME, if not given)."""
    name: str = "gpt"
    """Name of the run."""

    def __post_init__(self) -> None:
        _raise_faults(_at_least("log", 1, every=self.every))


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
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    step: StepConfig = field(default_factory=StepConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be >= 1, got {value}"
            for name, value in (("num_steps", self.num_steps), ("num_samples", self.num_samples))
            if value is not None and value < 1
        ]
        if not 0 <= self.seed < 2**32:
            faults.append(f"seed must be in [0, 2^32), got {self.seed}")
        _raise_faults(faults)

    @property
    def last_step(self) -> int:
        """The length of a resolved run."""
        assert self.num_steps is not None, "not resolved"
        return self.num_steps
