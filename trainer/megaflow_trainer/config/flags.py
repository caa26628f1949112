"""Megatron's flag names: one table from flag to configuration field, and the flags that have no field.

A flag is in exactly one of three tables: FLAGS (it sets a field), LEGACY (it means nothing any more and one line says
so), NOT_BUILT (the feature is not in this version; only the value that means "off" is accepted).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that sets a field. A switch (no value on the command line) sets it to `constant`."""

    name: str
    field: str
    constant: Any = None

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone on the command line."""
        return self.constant is not None


@dataclass(frozen=True, slots=True)
class LegacyFlag:
    """A flag that is accepted and does nothing; `why` is the line that says so (empty: nothing is said)."""

    name: str
    why: str
    takes_value: bool = False


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """A feature that this version does not have, the flags that ask for it, and the values that do not."""

    feature: str
    remedy: str
    switches: tuple[str, ...] = ()
    valued: tuple[tuple[str, tuple[str, ...]], ...] = ()


FLAGS: tuple[Flag, ...] = (
    Flag("--train-iters", "num_steps"),
    Flag("--train-samples", "num_samples"),
    Flag("--seed", "seed"),
    Flag("--num-layers", "model.num_layers"),
    Flag("--hidden-size", "model.hidden_dim"),
    Flag("--num-attention-heads", "model.num_heads"),
    Flag("--preset", "model.preset"),
    Flag("--kv-channels", "model.head_dim"),
    Flag("--num-query-groups", "model.num_kv_heads"),
    Flag("--ffn-hidden-size", "model.ffn_dim"),
    Flag("--activation", "model.activation"),
    Flag("--swiglu", "model.activation", constant="swiglu"),
    Flag("--squared-relu", "model.activation", constant="squared_relu"),
    Flag("--normalization", "model.norm"),
    Flag("--qk-layernorm", "model.qk_norm", constant=True),
    Flag("--disable-bias-linear", "model.linear_bias", constant=False),
    Flag("--add-qkv-bias", "model.qkv_bias", constant=True),
    Flag("--position-embedding-type", "model.position_kind"),
    Flag("--use-rotary-position-embeddings", "model.position_kind", constant="rope"),
    Flag("--rotary-base", "model.rotary_base"),
    Flag("--rotary-percent", "model.rotary_fraction"),
    Flag("--rotary-interleaved", "model.rotary_interleaved", constant=True),
    Flag("--rotary-scaling", "model.rotary_scaling"),
    Flag("--rotary-scaling-factor", "model.rotary_factor"),
    Flag("--rotary-original-positions", "model.rotary_original_positions"),
    Flag("--mscale", "model.rotary_mscale"),
    Flag("--mscale-all-dim", "model.rotary_mscale_all_dim"),
    Flag("--window-size", "model.window"),
    Flag("--multi-latent-attention", "model.is_latent", constant=True),
    Flag("--q-lora-rank", "model.q_latent_dim"),
    Flag("--kv-lora-rank", "model.kv_latent_dim"),
    Flag("--qk-head-dim", "model.qk_dim"),
    Flag("--qk-pos-emb-head-dim", "model.qk_rotary_dim"),
    Flag("--v-head-dim", "model.v_dim"),
    Flag("--mtp-num-layers", "model.num_mtp_layers"),
    Flag("--mtp-loss-scaling-factor", "model.mtp_loss_scale"),
    Flag("--max-position-embeddings", "model.max_positions"),
    Flag("--vocab-size", "model.vocab_size"),
    Flag("--make-vocab-size-divisible-by", "model.vocab_multiple"),
    Flag("--untie-embeddings-and-output-weights", "model.tied_embeddings", constant=False),
    Flag("--hidden-dropout", "model.hidden_dropout"),
    Flag("--attention-dropout", "model.attention_dropout"),
    Flag("--init-method-std", "model.init_std"),
    Flag("--no-scaled-output-init", "model.is_output_scaled", constant=False),
    Flag("--mup-base-hidden-size", "model.mup_base_dim"),
    Flag("--norm-epsilon", "model.norm_eps"),
    Flag("--layernorm-epsilon", "model.norm_eps"),
    Flag("--attention-backend", "model.attention"),
    Flag("--use-flash-attn", "model.attention", constant="flash"),
    Flag("--data-path", "data.path"),
    Flag("--train-data-path", "data.train_path"),
    Flag("--valid-data-path", "data.valid_path"),
    Flag("--test-data-path", "data.test_path"),
    Flag("--data-args-path", "data.args_path"),
    Flag("--per-split-data-args-path", "data.per_split_args_path"),
    Flag("--mock-data", "data.is_mock", constant=True),
    Flag("--split", "data.split"),
    Flag("--seq-length", "data.seq_len"),
    Flag("--tokenizer-type", "data.tokenizer_type"),
    Flag("--tokenizer-model", "data.tokenizer_model"),
    Flag("--vocab-file", "data.vocab_file"),
    Flag("--vocab", "data.vocab_file"),
    Flag("--merge-file", "data.merge_file"),
    Flag("--dataloader-type", "data.order"),
    Flag("--num-workers", "data.num_threads"),
    Flag("--prefetch", "data.prefetch"),
    Flag("--eod-mask-loss", "data.eod_mask_loss", constant=True),
    Flag("--reset-position-ids", "model.resets_positions", constant=True),
    Flag("--reset-attention-mask", "model.resets_attention", constant=True),
    Flag("--sample-order", "samples.order"),
    Flag("--sample-shuffle", "samples.shuffle"),
    Flag("--sample-packing", "samples.packing"),
    Flag("--blend-weights", "samples.blend_weights"),
    Flag("--blend-schedule", "samples.blend_schedule"),
    Flag("--data-cache-path", "samples.cache_dir"),
    Flag("--num-dataset-builder-threads", "samples.builder_threads"),
    Flag("--fim-rate", "samples.fim_rate"),
    Flag("--fim-spm-rate", "samples.fim_spm_rate"),
    Flag("--fim-prefix-token", "samples.fim_prefix_token"),
    Flag("--fim-middle-token", "samples.fim_middle_token"),
    Flag("--fim-suffix-token", "samples.fim_suffix_token"),
    Flag("--tensor-model-parallel-size", "parallel.tp"),
    Flag("--pipeline-model-parallel-size", "parallel.pp"),
    Flag("--context-parallel-size", "parallel.cp"),
    Flag("--cp-comm-type", "parallel.cp_kind"),
    Flag("--expert-model-parallel-size", "parallel.ep"),
    Flag("--pipeline-schedule", "parallel.schedule"),
    Flag("--num-virtual-stages-per-pipeline-rank", "parallel.virtual_stages"),
    Flag("--pipeline-model-parallel-layout", "parallel.stage_layout"),
    Flag("--sequence-parallel", "parallel.sequence_parallel", constant=True),
    Flag("--use-distributed-optimizer", "parallel.zero", constant=1),
    Flag("--zero-stage", "parallel.zero"),
    Flag("--num-distributed-optimizer-instances", "parallel.dp_replicate"),
    Flag("--ddp-bucket-size", "parallel.bucket_size"),
    Flag("--no-overlap", "parallel.overlaps", constant=False),
    Flag("--distributed-backend", "parallel.backend"),
    Flag("--optimizer", "optim.kind"),
    Flag("--lr", "optim.lr"),
    Flag("--weight-decay", "optim.weight_decay"),
    Flag("--start-weight-decay", "optim.start_weight_decay"),
    Flag("--end-weight-decay", "optim.end_weight_decay"),
    Flag("--weight-decay-incr-style", "optim.decay_style"),
    Flag("--no-decay", "optim.no_decay"),
    Flag("--adam-beta1", "optim.adam_beta1"),
    Flag("--adam-beta2", "optim.adam_beta2"),
    Flag("--adam-eps", "optim.adam_eps"),
    Flag("--sgd-momentum", "optim.sgd_momentum"),
    Flag("--muon-momentum", "optim.muon_momentum"),
    Flag("--clip-grad", "optim.clip_grad"),
    Flag("--main-params-dtype", "optim.main_dtype"),
    Flag("--main-grads-dtype", "optim.main_grad_dtype"),
    Flag("--exp-avg-dtype", "optim.exp_avg_dtype"),
    Flag("--exp-avg-sq-dtype", "optim.exp_avg_sq_dtype"),
    Flag("--optimizer-cpu-offload", "optim.is_offloaded", constant=True),
    Flag("--lr-decay-style", "schedule.style"),
    Flag("--min-lr", "schedule.min_lr"),
    Flag("--lr-decay-iters", "schedule.decay_steps"),
    Flag("--lr-decay-samples", "schedule.decay_samples"),
    Flag("--lr-warmup-iters", "schedule.warmup_steps"),
    Flag("--lr-warmup-samples", "schedule.warmup_samples"),
    Flag("--lr-warmup-fraction", "schedule.warmup_fraction"),
    Flag("--lr-warmup-init", "schedule.warmup_init"),
    Flag("--lr-wsd-decay-iters", "schedule.wsd_steps"),
    Flag("--lr-wsd-decay-samples", "schedule.wsd_samples"),
    Flag("--lr-wsd-decay-style", "schedule.wsd_style"),
    Flag("--micro-batch-size", "step.micro_batch_size"),
    Flag("--global-batch-size", "step.global_batch_size"),
    Flag("--num-micro-batches", "step.num_micro_batches"),
    Flag("--gradient-accumulation-steps", "step.num_micro_batches"),
    Flag("--rampup-batch-size", "step.ramp_up"),
    Flag("--bf16", "step.dtype", constant="bf16"),
    Flag("--fp16", "step.dtype", constant="fp16"),
    Flag("--fp64", "step.dtype", constant="fp64"),
    Flag("--fp8-format", "step.fp8"),
    Flag("--fp8-hybrid", "step.fp8", constant="hybrid"),
    Flag("--fp8-e4m3", "step.fp8", constant="e4m3"),
    Flag("--all-bf16", "step.is_all_bf16", constant=True),
    Flag("--tf32", "step.allows_tf32", constant=True),
    Flag("--compile", "step.is_compiled", constant=True),
    Flag("--no-gradient-accumulation-fusion", "step.accumulates_in_products", constant=False),
    Flag("--loss-scale", "step.loss_scale"),
    Flag("--initial-loss-scale", "step.initial_loss_scale"),
    Flag("--min-loss-scale", "step.min_loss_scale"),
    Flag("--loss-scale-window", "step.loss_scale_window"),
    Flag("--hysteresis", "step.hysteresis"),
    Flag("--recompute-granularity", "recompute.granularity"),
    Flag("--recompute-activations", "recompute.granularity", constant="selective"),
    Flag("--checkpoint-activations", "recompute.granularity", constant="full"),
    Flag("--enable-activation-checkpointing", "recompute.granularity", constant="full"),
    Flag("--recompute-method", "recompute.method"),
    Flag("--recompute-num-layers", "recompute.num_layers"),
    Flag("--checkpoint-num-layers", "recompute.num_layers"),
    Flag("--recompute-modules", "recompute.modules"),
    Flag("--recompute-budget", "recompute.budget"),
    Flag("--compress-activations", "recompute.compression"),
    Flag("--offload-activations", "recompute.is_offloaded", constant=True),
    Flag("--eval-interval", "eval.every"),
    Flag("--eval-iters", "eval.steps"),
    Flag("--save", "checkpoint.save"),
    Flag("--load", "checkpoint.load"),
    Flag("--init-from", "checkpoint.init_from"),
    Flag("--grow", "checkpoint.grow", constant=True),
    Flag("--save-interval", "checkpoint.every"),
    Flag("--async-save", "checkpoint.is_async", constant=True),
    Flag("--no-async-save", "checkpoint.is_async", constant=False),
    Flag("--keep-last", "checkpoint.keep_last"),
    Flag("--keep-every", "checkpoint.keep_every"),
    Flag("--finetune", "checkpoint.is_finetune", constant=True),
    Flag("--no-load-optim", "checkpoint.loads_optimizer", constant=False),
    Flag("--no-load-rng", "checkpoint.loads_rng", constant=False),
    Flag("--schedule-from", "checkpoint.schedule_from"),
    Flag("--override-opt_param-scheduler", "checkpoint.schedule_from", constant="command"),
    Flag("--override-opt-param-scheduler", "checkpoint.schedule_from", constant="command"),
    Flag("--use-checkpoint-opt_param-scheduler", "checkpoint.schedule_from", constant="checkpoint"),
    Flag("--use-checkpoint-opt-param-scheduler", "checkpoint.schedule_from", constant="checkpoint"),
    Flag("--log-interval", "log.every"),
    Flag("--run-dir", "log.run_dir"),
    Flag("--run-name", "log.name"),
    Flag("--wandb-exp-name", "log.name"),
    Flag("--tensorboard-dir", "log.tensorboard_dir"),
    Flag("--wandb-project", "log.wandb_project"),
    Flag("--wandb-entity", "log.wandb_entity"),
    Flag("--profile", "log.is_profiled", constant=True),
    Flag("--profile-step-start", "log.profile_start"),
    Flag("--profile-step-end", "log.profile_end"),
    Flag("--profile-ranks", "log.profile_ranks"),
    Flag("--max-nonfinite-steps", "guard.max_bad_steps"),
    Flag("--spike-threshold", "guard.spike_threshold"),
    Flag("--spike-window", "guard.spike_window"),
    Flag("--exit-duration-in-mins", "guard.exit_minutes"),
    Flag("--exit-interval", "guard.exit_every"),
    Flag("--hang-timeout", "guard.hang_s"),
    Flag("--straggler-ratio", "guard.straggler_ratio"),
)

LEGACY: tuple[LegacyFlag, ...] = (
    LegacyFlag("--local-rank", "", takes_value=True),
    LegacyFlag("--local_rank", "", takes_value=True),
    LegacyFlag("--use-mcore-models", "there is one model implementation"),
    LegacyFlag("--use-legacy-models", "there is one model implementation"),
    LegacyFlag("--data-impl", "a .bin/.idx pair is always memory-mapped", takes_value=True),
    LegacyFlag("--dataset-impl", "a .bin/.idx pair is always memory-mapped", takes_value=True),
    LegacyFlag("--fim-data", "--fim-rate alone says how many documents are reordered"),
    LegacyFlag("--no-mmap-bin-files", "a .bin/.idx pair is always memory-mapped"),
    LegacyFlag("--mid-level-dataset-surplus", "the surplus is Megatron's default, 0.005", takes_value=True),
    LegacyFlag("--dataloader-fast-cache-load", "every rank looks into the cache, and builds only what it lacks"),
    LegacyFlag("--dataloader-defer-npy-index-mmap", "an index is mapped and not read"),
    LegacyFlag("--no-create-attention-mask-in-dataloader", "the loader never makes attention masks"),
    LegacyFlag("--DDP-impl", "there is one data-parallel engine", takes_value=True),
    LegacyFlag("--no-bias-gelu-fusion", "there is no hand-fused bias and GELU to turn off"),
    LegacyFlag("--no-bias-dropout-fusion", "there is no hand-fused bias and dropout to turn off"),
    LegacyFlag("--no-masked-softmax-fusion", "the attention kernel decides about its softmax"),
    LegacyFlag(
        "--no-async-tensor-model-parallel-allreduce", "collectives of tensor parallelism are never asynchronous"
    ),
    LegacyFlag("--use-cpu-initialization", "weights are always drawn on the CPU, alike on every device"),
    LegacyFlag(
        "--accumulate-allreduce-grads-in-fp32",
        "gradients are accumulated and reduced in fp32 unless --main-grads-dtype says otherwise",
    ),
    LegacyFlag("--overlap-grad-reduce", "gradients are sent while backward goes on unless --no-overlap is given"),
    LegacyFlag("--overlap-param-gather", "weights are sent while forward goes on unless --no-overlap is given"),
    LegacyFlag("--attention-softmax-in-fp32", "softmax is always computed in fp32"),
    LegacyFlag("--log-throughput", "throughput is always logged"),
    LegacyFlag("--calculate-per-token-loss", "the loss is always averaged per token"),
    LegacyFlag("--group-query-attention", "--num-query-groups alone says how many groups there are"),
    LegacyFlag("--ckpt-format", "checkpoints are safetensors and JSON", takes_value=True),
    LegacyFlag("--use-dist-ckpt", "every checkpoint loads under any layout"),
    LegacyFlag("--exit-signal-handler", "SIGTERM and SIGUSR1 always end in a checkpoint"),
    LegacyFlag("--check-for-nan-in-loss-and-grad", "a step that is not finite is always skipped and told"),
    LegacyFlag("--no-check-for-nan-in-loss-and-grad", "a step that is not finite is always skipped and told"),
    LegacyFlag("--check-for-spiky-loss", "spikes are always told"),
    LegacyFlag("--log-params-norm", "the norm of the weights is always logged"),
    LegacyFlag("--log-memory-to-tensorboard", "memory is always logged"),
    LegacyFlag("--log-timers-to-tensorboard", "times are always logged"),
    LegacyFlag("--log-straggler", "slow ranks are always told"),
    LegacyFlag("--use-pytorch-profiler", "--profile always takes torch's profiler"),
)

NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt("a choice of fp8 scaling", "drop the flag", valued=(("--fp8-recipe", ()),)),
    NotBuilt(
        "Transformer Engine layers",
        "drop the flag: --transformer-impl local is the default",
        valued=(("--transformer-impl", ("local",)),),
    ),
    NotBuilt(
        "mixture of experts",
        "drop the flag: the model is dense",
        switches=("--moe-grouped-gemm",),
        valued=tuple(
            (name, ())
            for name in (
                "--num-experts",
                "--moe-router-topk",
                "--moe-aux-loss-coeff",
                "--moe-router-load-balancing-type",
                "--moe-token-dispatcher-type",
            )
        ),
    ),
)


def find_spelling(field: str) -> str:
    """The flag that sets a field, for messages; the dotted name if there is none."""
    return next((flag.name for flag in FLAGS if flag.field == field and not flag.is_switch), field)
