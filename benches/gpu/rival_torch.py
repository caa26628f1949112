#!/usr/bin/env python3
"""Training steps of a GPT by torch alone: `nn.Module`, SDPA, `torch.compile`, `F.cross_entropy`, fused AdamW.

    python3 benches/gpu/rival_torch.py gpt-1.3b --recipe fp32

The rival of `train.py` that anyone can write, on its rows without experts, on one GPU and without any code of megaflow.
Steps are whole: forward, backward, clipping, AdamW; tokens are random and already on the GPU. Two recipes:

- `bf16`: weights, gradients and moments in bf16.
- `fp32`: weights, gradients and moments in fp32, products in bf16 by autocast.

The whole model is compiled. Prints one JSON line, as `rival_megatron.py` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from keys import record_rival
from rival_parts import list_longest, print_line, profile_step, time_steps
from rows import ROWS, VOCAB, read_sizes
from torch import Tensor, nn

# b micro-batch, s sequence, h hidden, n heads, d head dim, v vocab, f ffn


class Block(nn.Module):
    """Attention and MLP with their residual sums. `[b, s, h]` to the same."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        h, f = sizes.hidden_size, sizes.ffn_hidden_size or 4 * sizes.hidden_size
        has_bias, self.is_gated = not sizes.disable_bias_linear, sizes.swiglu
        self.num_heads, self.has_rope = sizes.num_attention_heads, sizes.position_embedding_type == "rope"
        self.norm_attention, self.norm_mlp = make_norm(sizes), make_norm(sizes)
        self.qkv, self.out = nn.Linear(h, 3 * h, bias=has_bias), nn.Linear(h, h, bias=has_bias)
        self.up = nn.Linear(h, 2 * f if self.is_gated else f, bias=has_bias)
        self.down = nn.Linear(f, h, bias=has_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(b, s, 3, self.num_heads, h // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [b, n, s, d]
        if self.has_rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        inner = self.up(self.norm_mlp(x))
        if self.is_gated:
            gate, inner = inner.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * inner)
        return x + self.down(F.gelu(inner, approximate="tanh"))


class Model(nn.Module):
    """A GPT with its loss."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        h, s = sizes.hidden_size, sizes.seq_length
        d = h // sizes.num_attention_heads
        self.embedding = nn.Embedding(VOCAB, h)
        self.positions = None if sizes.position_embedding_type == "rope" else nn.Embedding(s, h)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm = make_norm(sizes)
        self.head = nn.Linear(h, VOCAB, bias=False)
        if not sizes.untie_embeddings_and_output_weights:
            self.head.weight = self.embedding.weight
        angles = torch.outer(torch.arange(s).float(), 10000.0 ** -(torch.arange(0, d, 2).float() / d))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)  # [s, d]
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of `[b, s]`."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        scores = self.head(self.norm(x))  # [b, s, v]
        return F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())


def make_norm(sizes: argparse.Namespace) -> nn.Module:
    """The norm of a row."""
    kind = nn.RMSNorm if sizes.normalization == "RMSNorm" else nn.LayerNorm
    return kind(sizes.hidden_size, eps=1e-5)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions turned into `[b, n, s, d]`, channels paired by halves."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-right, left), dim=-1) * sin).to(x.dtype)


def make_step(model: nn.Module, sizes: argparse.Namespace, options: argparse.Namespace) -> Callable[[], None]:
    """A whole step on random tokens."""
    device = next(model.parameters()).device
    shape = (sizes.micro_batch_size, sizes.seq_length)
    tokens, labels = (torch.randint(VOCAB, shape, device=device) for _ in range(2))
    num_micro = sizes.global_batch_size // sizes.micro_batch_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    run = torch.compile(model, dynamic=False) if options.compile else model

    def step() -> None:
        for _ in range(num_micro):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.recipe == "fp32"):
                loss = run(tokens, labels) / num_micro
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("row", choices=sorted(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}, without experts")
    parser.add_argument("--sizes", default="", metavar="FLAGS", help="sizes that differ from the row's, as megaflow's")
    parser.add_argument("--recipe", choices=("bf16", "fp32"), default="fp32", help="see above (default: fp32)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile")
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels with the most time (default: 0)")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed, after 4 others (default: 8)")
    options = parser.parse_args()
    sizes = read_sizes(f"{ROWS[options.row].shape} {options.sizes}")
    if sizes.num_experts:
        parser.error(f"{options.row} has experts, and this model has none")
    for name, least in (("steps", 1), ("kernels", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be >= {least}, got {getattr(options, name)}")
    return argparse.Namespace(**vars(options), read=sizes, tp=1, ep=1, fp8=None, recompute=None, attention="sdpa")


def main() -> None:
    """Train a few steps, and print what they took."""
    options = parse_options()
    sizes = options.read
    torch.manual_seed(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        print("no GPU here: the figures are this processor's", file=sys.stderr)
    model = Model(sizes).to(device)
    if options.recipe == "bf16":
        model = model.bfloat16()
    step = make_step(model, sizes, options)
    try:
        seconds = time_steps(step, options.steps)
    except torch.OutOfMemoryError as lack:
        sys.exit(f"error: out of memory: {next(iter(str(lack).splitlines()), 'no reason given')}")
    facts = {"row": options.row, "side": "torch", **record_rival(options, sizes, 1)}
    kernels = profile_step(step) if options.kernels and device.type == "cuda" else []
    tokens = sizes.global_batch_size * sizes.seq_length
    print_line(facts, tokens, seconds, exposed_communication_s=0.0, kernels=list_longest(kernels, options.kernels))


if __name__ == "__main__":
    main()
