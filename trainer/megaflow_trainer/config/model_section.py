"""The section that says what is trained: shape and initialisation of the GPT."""

from __future__ import annotations

from dataclasses import dataclass

from megaflow_trainer.config.expert_section import ExpertConfig, list_expert_faults, read_pattern
from megaflow_trainer.config.limits import (
    MOST_LAYERS,
    MOST_TOKENS,
    MOST_WIDTH,
    at_least,
    at_most,
    fraction,
    one_of,
    raise_faults,
)

ATTENTION_KERNELS = ("auto", "sdpa", "flash", "cudnn", "math", "flash_attn_4", "flash_attn_2", "transformer_engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(ExpertConfig):
    """Shape and initialisation of the GPT; the defaults are GPT-2 small. The fields of experts are its base's."""

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
    rotary_mscale: float = 1.0
    """Growth of rotated channels under yarn: they are multiplied by (0.1 mscale ln factor + 1)."""
    rotary_mscale_all_dim: float = 0.0
    """The same for whole heads of latent attention, as DeepSeek has it: scores are multiplied by (0.1 mscale_all_dim ln
    factor + 1) squared, and rotated channels divided by it once."""
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
    """Attention kernel: auto (on GPUs the fastest at this shape, timed at the start), sdpa, flash, cudnn or math; from
    optional packages flash_attn_4, flash_attn_2 or transformer_engine."""
    is_attention_timed: bool = True
    """Whether auto times the kernels; otherwise it takes the first that can serve."""
    resets_positions: bool = False
    """Whether positions begin again behind each end-of-document token."""
    resets_attention: bool = False
    """Whether tokens see those of their own document only."""

    def __post_init__(self) -> None:
        raise_faults(
            at_least("model", 1, num_layers=self.num_layers, hidden_dim=self.hidden_dim, num_heads=self.num_heads)
            + at_least("model", 1, ffn_dim=self.ffn_dim, max_positions=self.max_positions, window=self.window)
            + at_least("model", 1, head_dim=self.head_dim, num_kv_heads=self.num_kv_heads)
            + at_least("model", 1, q_latent_dim=self.q_latent_dim, kv_latent_dim=self.kv_latent_dim)
            + at_least("model", 1, qk_dim=self.qk_dim, v_dim=self.v_dim, mup_base_dim=self.mup_base_dim)
            + at_least("model", 2, qk_rotary_dim=self.qk_rotary_dim)
            + at_most("model", MOST_LAYERS, "lower it", num_layers=self.num_layers, num_mtp_layers=self.num_mtp_layers)
            + at_most("model", MOST_WIDTH, "lower it", hidden_dim=self.hidden_dim, ffn_dim=self.ffn_dim)
            + at_most("model", MOST_WIDTH, "lower it", num_heads=self.num_heads, head_dim=self.head_dim)
            + at_most("model", MOST_WIDTH, "lower it", q_latent_dim=self.q_latent_dim, kv_latent_dim=self.kv_latent_dim)
            + at_most("model", MOST_WIDTH, "lower it", qk_dim=self.qk_dim, qk_rotary_dim=self.qk_rotary_dim)
            + at_most("model", MOST_WIDTH, "lower it", v_dim=self.v_dim, vocab_multiple=self.vocab_multiple)
            + at_most("model", MOST_TOKENS, "lower it", vocab_size=self.vocab_size, max_positions=self.max_positions)
            + at_least("model", 0, num_mtp_layers=self.num_mtp_layers, mtp_loss_scale=self.mtp_loss_scale)
            + one_of("model", ("gelu", "swiglu", "squared_relu"), activation=self.activation)
            + one_of("model", ("LayerNorm", "RMSNorm"), norm=self.norm)
            + one_of("model", ATTENTION_KERNELS, attention=self.attention)
            + one_of("model", ("learned_absolute", "rope", "none"), position_kind=self.position_kind)
            + one_of("model", ("none", "linear", "ntk", "llama3", "yarn"), rotary_scaling=self.rotary_scaling)
            + at_least("model", 1, rotary_base=self.rotary_base, rotary_factor=self.rotary_factor)
            + at_least("model", 1, rotary_original_positions=self.rotary_original_positions)
            + at_least("model", 0, rotary_fraction=self.rotary_fraction, rotary_mscale=self.rotary_mscale)
            + at_least("model", 0, rotary_mscale_all_dim=self.rotary_mscale_all_dim)
            + at_least("model", 2, vocab_size=self.vocab_size)
            + at_least("model", 1, vocab_multiple=self.vocab_multiple)
            + at_least("model", 0, init_std=self.init_std, norm_eps=self.norm_eps)
            + fraction("model", hidden_dropout=self.hidden_dropout, attention_dropout=self.attention_dropout)
            + list_expert_faults(self)
        )

    @property
    def head_width(self) -> int:
        """Width of one head of queries and keys."""
        return self.head_dim or self.hidden_dim // self.num_heads

    @property
    def tells_documents(self) -> bool:
        """Whether the model is told which token belongs to which document of a sample."""
        return self.resets_positions or self.resets_attention

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
    def expert_width(self) -> int:
        """Width inside an expert."""
        return self.expert_dim or self.ffn_width

    def has_experts(self, number: int) -> bool:
        """Whether block `number`, counted from 0, has experts; those of multi-token prediction are like the last."""
        if self.num_experts is None:
            return False
        return read_pattern(self.expert_layers, self.num_layers)[min(number, self.num_layers - 1)]

    @property
    def has_noise(self) -> bool:
        """Whether random numbers are drawn by the tokens' places: dropout, or jitter or choices of routers."""
        is_router_noisy = self.router_jitter > 0 or self.is_router_random
        return self.hidden_dropout > 0 or (self.num_experts is not None and is_router_noisy)

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
