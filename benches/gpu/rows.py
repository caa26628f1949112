"""Rows of the trainer's table: shapes, and the flags that each side usually runs with. No torch, no megaflow."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
UNTIED = "--untie-embeddings-and-output-weights"
SMALL = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048"
LARGE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096"
COMMON = (
    "--bf16 --vocab-size 50257 --make-vocab-size-divisible-by 128 --hidden-dropout 0 --attention-dropout 0 --lr 3e-4 "
    "--min-lr 3e-5 --lr-warmup-iters 2 --clip-grad 1.0 --weight-decay 0.1 --eval-interval 0 --split 100,0,0"
)
"""What every run of megaflow has beside its shape."""
VOCAB = 50304
"""Rows of the embedding that COMMON asks for."""
RECIPE_FLAGS = {"fp32": "", "bf16": "--all-bf16"}
"""Weights in bf16 with masters, moments and gradient sums in fp32; everything in bf16."""
ATTENTIONS = ("", "--attention fused")
"""Of Megatron-Core: what Transformer Engine chooses (flash-attn 4 where it is installed), and cuDNN's."""
DELAYED, TENSORWISE = "--fp8-hybrid --fp8-recipe delayed", "--fp8-hybrid --fp8-recipe tensorwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A model at a micro-batch size.

    Args:
        shape: flags of its sizes, for all sides.
        flags: megaflow's usual flags; each is a run.
        megatron: Megatron-Core's usual flags beside what it takes from megaflow's run (recipe, fp8, layout, recompute);
            each is a run. The best of a side is shown.
        torch: plain torch's usual flags; none where it is no rival.
        recipes: what weights and states are kept in, a run each.
        extra: more of megaflow's flags by recipe, where the model does not fit without.
    """

    shape: str
    flags: tuple[str, ...] = ("",)
    megatron: tuple[str, ...] = ("",)
    torch: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ("fp32", "bf16")
    extra: tuple[tuple[str, str], ...] = ()


ROWS = {
    "tiny": Row(
        shape="--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
        "--global-batch-size 4",
        torch=("--no-compile",),
        recipes=("fp32",),
    ),
    "gpt2-124m": Row(
        shape="--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 32 "
        "--global-batch-size 64",
        flags=("--enable-cuda-graph",),
        megatron=("--graphs local", "--graphs local --attention fused"),
        torch=("",),
    ),
    "gpt-1.3b": Row(shape=f"{SMALL} --micro-batch-size 16 --global-batch-size 32", megatron=ATTENTIONS, torch=("",)),
    "gpt-1.3b-mbs8": Row(
        shape=f"{SMALL} --micro-batch-size 8 --global-batch-size 32", megatron=ATTENTIONS, torch=("",)
    ),
    "gpt-1.3b-fp8": Row(
        shape=f"{SMALL} --micro-batch-size 16 --global-batch-size 32",
        flags=(TENSORWISE, DELAYED),
        megatron=ATTENTIONS,
    ),
    "gpt-1.3b-local": Row(
        shape=f"{SMALL} --micro-batch-size 4 --global-batch-size 32", megatron=("--transformer-impl local",)
    ),
    "llama-1.3b": Row(
        shape=f"{SMALL} --ffn-hidden-size 5632 {LLAMA} {UNTIED} --micro-batch-size 8 --global-batch-size 32",
        megatron=ATTENTIONS,
    ),
    "gpt-6.7b": Row(
        shape=f"{LARGE} --micro-batch-size 2 --global-batch-size 4",
        megatron=ATTENTIONS,
        recipes=("bf16", "fp32"),
        extra=(("fp32", "--recompute-granularity selective --recompute-modules mlp"),),
    ),
    "llama-6.7b": Row(
        shape=f"{LARGE} --ffn-hidden-size 11008 {LLAMA} {UNTIED} --micro-batch-size 2 --global-batch-size 4",
        megatron=ATTENTIONS,
        recipes=("bf16",),
    ),
    "llama-6.7b-fp8": Row(
        shape=f"{LARGE} --ffn-hidden-size 11008 {LLAMA} {UNTIED} --micro-batch-size 2 --global-batch-size 4",
        megatron=ATTENTIONS,
        flags=(TENSORWISE,),
        recipes=("bf16",),
    ),
    "moe-8x1b": Row(
        shape="--num-layers 12 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --ffn-hidden-size 5632 "
        f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --micro-batch-size 8 "
        "--global-batch-size 32",
        flags=("--moe-router-force-load-balancing",),
        megatron=ATTENTIONS,
    ),
}
NUMBERS = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "global-batch-size")
SWITCHES = (
    "swiglu",
    "disable-bias-linear",
    "untie-embeddings-and-output-weights",
    "moe-router-force-load-balancing",
)


def read_sizes(words: str) -> argparse.Namespace:
    """The sizes among flags of megaflow, the last of each; other flags are passed over."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="sizes of a run")
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("ffn-hidden-size", "num-experts", "moe-router-topk"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--moe-aux-loss-coeff", type=float)
    parser.add_argument("--normalization", default="LayerNorm")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_known_args(words.split())[0]


def write_sizes(sizes: argparse.Namespace) -> str:
    """The flags that `read_sizes` reads the same sizes from."""
    words = []
    for name, value in vars(sizes).items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return " ".join(words)
