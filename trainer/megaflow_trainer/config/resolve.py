"""Fills in every field that can be derived from the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megaflow_trainer.config.batch import count_steps, solve_batch
from megaflow_trainer.config.idle import list_idle
from megaflow_trainer.config.layout import make_layout
from megaflow_trainer.config.sections import OptimConfig, RecomputeConfig, TrainConfig


def resolve(config: TrainConfig, *, world_size: int) -> tuple[TrainConfig, list[str]]:
    """Derive batch sizes, length, widths and the run folder of a configuration without faults.

    Returns:
        The complete configuration, and lines about settings that have no effect in it.
    """
    sizes = solve_batch(config.step, dp=make_layout(config.parallel, world_size=world_size).dp)
    model = dataclasses.replace(
        config.model,
        ffn_dim=config.model.ffn_width,
        max_positions=config.model.max_positions or config.data.seq_len,
        resets_positions=config.model.resets_positions or config.data.keeps_documents_apart,
        resets_attention=config.model.resets_attention or config.data.keeps_documents_apart,
    )
    run_dir = config.log.run_dir or config.checkpoint.save or str(Path("runs") / config.log.name)
    step = dataclasses.replace(config.step, **dataclasses.asdict(sizes))
    return dataclasses.replace(
        config,
        num_steps=config.num_steps or count_steps(step, config.num_samples or 0),
        model=model,
        step=step,
        optim=_resolve_optim(config),
        eval=dataclasses.replace(config.eval, every=config.eval.every if config.eval.steps else 0),
        recompute=_resolve_recompute(config),
        log=dataclasses.replace(config.log, run_dir=run_dir),
    ), _list_notes(config)


def _resolve_optim(config: TrainConfig) -> OptimConfig:
    own = config.optim
    if own.kind == "adam":
        own = dataclasses.replace(own, kind="adamw")
    if not config.step.is_all_bf16:
        return own
    return dataclasses.replace(
        own, main_dtype="bf16", main_grad_dtype="bf16", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
    )


def _resolve_recompute(config: TrainConfig) -> RecomputeConfig:
    own = config.recompute
    if own.granularity == "full":
        return dataclasses.replace(own, method=own.method or "uniform")
    if own.granularity == "selective" and own.budget is None:
        return dataclasses.replace(own, modules=own.modules or ("attention",))
    return own


def _list_notes(config: TrainConfig) -> list[str]:
    notes = list_idle(config)
    if config.checkpoint.grow and config.checkpoint.init_from is None:
        notes.append("--grow has no effect without --init-from")
    if config.parallel.sequence_parallel and config.parallel.tp == 1:
        notes.append("--sequence-parallel has no effect at tensor-parallel size 1")
    if config.data.vocab_file and not config.data.tokenizer_type:
        notes.append("vocabulary and merges without --tokenizer-type: taken as a GPT-2 byte-level BPE")
    if config.model.num_experts is not None and config.model.is_router_random:
        notes.append(
            "routers choose at random (--moe-router-force-load-balancing): for benchmarks, the model learns nothing of "
            "routing"
        )
    return notes
