"""What a command line of megaflow asks for, read by its own configuration, and how a rival follows it. No torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rows import COMMON, ROWS, read_sizes, write_sizes

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "trainer"), str(ROOT / "python")]

from megaflow.errors import ConfigError  # noqa: E402
from megaflow_trainer.config import read_command  # noqa: E402
from megaflow_trainer.config.arithmetic import count_flops_per_token  # noqa: E402

STATES = ("main_dtype", "main_grad_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
FOLLOWED = ("model", "data.seq_len", "step.micro_batch_size", "step.global_batch_size")
"""Fields that a rival takes from the sizes it is handed."""
FIXED = ("step.dtype", "optim.kind", "optim.is_offloaded", "data.keeps_documents_apart", "recompute.compression")
"""Fields that a rival cannot follow at all."""
OWN_CHOICE = ("attention", "is_attention_timed", "expert_kernel")
"""Of the model's section: which kernel computes it, which each side chooses for itself."""
MODULES = {"mlp": "mlp", "attention_core": "core_attn"}
"""Parts that selective recompute takes, in megaflow's words and in Megatron-Core's."""


class RefusedError(Exception):
    """These flags are refused: by megaflow, or because a rival cannot follow them."""


def read_config(words: str, ranks: int) -> Any:
    """The configuration of flags beside COMMON.

    Raises:
        RefusedError: if megaflow refuses them.
    """
    given = f"{COMMON} {words} --data-path none --train-iters 1"
    try:
        return read_command(given.split(), world_size=ranks)[0]
    except ConfigError as error:
        raise RefusedError(str(error)) from None


def describe_run(row: str, flags: str, ranks: int) -> dict[str, Any]:
    """What a run of megaflow is recorded with and found by.

    Raises:
        RefusedError: if megaflow refuses the flags.
    """
    words = f"{ROWS[row].shape} {flags}"
    config = read_config(words, ranks)
    layout = {name: getattr(config.parallel, name) for name in ("tp", "pp", "cp", "ep")}
    dp = ranks // (layout["tp"] * layout["pp"] * layout["cp"])
    layout["sp"] = int(config.parallel.sequence_parallel and layout["tp"] > 1)
    layout["zero"] = config.parallel.zero if dp > 1 else 0
    states = [getattr(config.optim, name) for name in STATES]
    full, causal = (
        count_flops_per_token(config.model, seq_len=config.data.seq_len, is_causal=is_causal)
        for is_causal in (False, True)
    )
    return {
        "row": row,
        "side": "megaflow",
        "flags": flags,
        "recipe": states[0] if len(set(states)) == 1 else "/".join(states),
        "ranks": ranks,
        "layout": layout,
        "fp8": name_fp8(config),
        "attention": config.model.attention,
        "recompute": name_recompute(config.recompute),
        "sizes": write_sizes(read_sizes(words)),
        "flops_per_token": full,
        "flops_per_token_causal": causal,
    }


def name_fp8(config: Any) -> str:
    """`none`, or where scales come from, with the format if it is not hybrid."""
    kind = config.step.fp8
    if kind in ("none", "hybrid"):
        return "none" if kind == "none" else str(config.precision.recipe)
    return f"{config.precision.recipe} {kind}"


def name_recompute(recompute: Any) -> str:
    """`none`, `full`, or the parts that selective recompute takes."""
    if recompute.granularity != "selective":
        return str(recompute.granularity)
    parts = sorted(MODULES.get(name, name) for name in recompute.modules)
    return " ".join(parts) + (f" budget {recompute.budget}" if recompute.budget is not None else "")


def check_rival(facts: dict[str, Any]) -> None:
    """See that a rival that is handed the sizes of a run of megaflow computes the same model.

    Raises:
        RefusedError: with every setting that it would not follow.
    """
    ranks = facts["ranks"]
    own = read_config(f"{ROWS[facts['row']].shape} {facts['flags']}", ranks)
    handed = read_config(facts["sizes"], ranks)
    unlike = [name for name in (*FOLLOWED, *FIXED) if name != "model" and _get(own, name) != _get(handed, name)]
    unlike += [
        f"model.{name}"
        for name in type(own.model).__dataclass_fields__
        if name not in OWN_CHOICE and getattr(own.model, name) != getattr(handed.model, name)
    ]
    if unlike:
        told = ", ".join(f"{name} is {_get(own, name)!r}, there {_get(handed, name)!r}" for name in unlike)
        raise RefusedError(f"a rival cannot follow {facts['flags']!r}: {told}")


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def derive_megatron(facts: dict[str, Any]) -> str:
    """Flags of rival_megatron.py for the recipe, layout, fp8 and recompute of a run of megaflow.

    Raises:
        RefusedError: if it has no such recipe, layout, fp8 or recompute.
    """
    layout, is_main = facts["layout"], facts["recipe"] == "fp32"
    has_copies = facts["ranks"] > layout["tp"] * layout["pp"] * layout["cp"]
    obstacles = [
        (facts["recipe"] not in ("fp32", "bf16"), f"states in {facts['recipe']}"),
        (layout["pp"] > 1, "pipeline stages"),
        (layout["cp"] > 1, "context parallelism"),
        (layout["tp"] > 1 and not layout["sp"], "tensor parallelism without sequence parallelism"),
        (layout["zero"] > 1, f"ZeRO {layout['zero']}"),
        (layout["zero"] == 1 and not is_main, "ZeRO 1 in recipe bf16"),
        (layout["zero"] == 0 and is_main and has_copies, "data parallelism without ZeRO 1 in recipe fp32"),
        (facts["fp8"] not in ("none", "tensorwise", "delayed"), f"fp8 {facts['fp8']}"),
        (facts["recompute"] not in ("none", *MODULES.values()), f"recompute of {facts['recompute']}"),
    ]
    if lacking := [what for is_asked, what in obstacles if is_asked]:
        raise RefusedError(f"the rival here has no {', no '.join(lacking)}")
    words = ["--recipe", facts["recipe"]]
    for name in ("tp", "ep"):
        words += [f"--{name}", str(layout[name])] if layout[name] > 1 else []
    for name in ("fp8", "recompute"):
        words += [f"--{name}", facts[name]] if facts[name] != "none" else []
    return " ".join(words)


def derive_torch(facts: dict[str, Any]) -> str:
    """Flags of rival_torch.py for the recipe of a run of megaflow.

    Raises:
        RefusedError: if plain torch does not do what it does.
    """
    sizes = read_sizes(facts["sizes"])
    obstacles = [
        (facts["recipe"] not in ("fp32", "bf16"), f"states in {facts['recipe']}"),
        (facts["ranks"] > 1, "several ranks"),
        (facts["fp8"] != "none", "fp8"),
        (facts["recompute"] != "none", "recompute"),
        (bool(sizes.num_experts), "experts"),
    ]
    if lacking := [what for is_asked, what in obstacles if is_asked]:
        raise RefusedError(f"plain torch here has no {', no '.join(lacking)}")
    return f"--recipe {facts['recipe']}"
