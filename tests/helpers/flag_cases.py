"""Flags of the trainer and what shows that each is wired in: flags to give beside it, or before and after, by where it
is seen; `test_flags.py` looks there.
"""

from __future__ import annotations

YARN = "--position-embedding-type rope --rotary-scaling yarn --rotary-scaling-factor 4"
ROPE = "--position-embedding-type rope"
EXPERTS = "--num-experts 4"
MANY = "--num-experts 8 --moe-router-group-topk 1 --moe-router-num-groups"
CAPACITY = f"{EXPERTS} --moe-expert-capacity-factor 0.5"
LATENT = f"{ROPE} --multi-latent-attention --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"

MODEL = {
    "--seed": "--seed 7",
    "--num-layers": "--num-layers 3",
    "--hidden-size": "--hidden-size 64",
    "--num-attention-heads": "--num-attention-heads 2",
    "--preset": "--preset gpt2_small",
    "--kv-channels": "--kv-channels 16",
    "--num-query-groups": "--num-query-groups 2",
    "--ffn-hidden-size": "--ffn-hidden-size 48",
    "--activation": "--activation squared_relu",
    "--swiglu": "--swiglu",
    "--squared-relu": "--squared-relu",
    "--normalization": "--normalization RMSNorm",
    "--qk-layernorm": "--qk-layernorm",
    "--disable-bias-linear": "--disable-bias-linear",
    "--add-qkv-bias": ("--disable-bias-linear", "--disable-bias-linear --add-qkv-bias"),
    "--position-embedding-type": "--position-embedding-type none",
    "--use-rotary-position-embeddings": "--use-rotary-position-embeddings",
    "--rotary-base": (ROPE, f"{ROPE} --rotary-base 100"),
    "--rotary-percent": (ROPE, f"{ROPE} --rotary-percent 0.5"),
    "--rotary-interleaved": (ROPE, f"{ROPE} --rotary-interleaved"),
    "--rotary-scaling": (ROPE, f"{ROPE} --rotary-scaling linear --rotary-scaling-factor 2"),
    "--rotary-scaling-factor": tuple(f"{ROPE} --rotary-scaling ntk --rotary-scaling-factor {x}" for x in (2, 4)),
    "--rotary-original-positions": tuple(
        f"{ROPE} --rotary-scaling llama3 --rotary-scaling-factor 2 --rotary-original-positions {x}" for x in (8, 64)
    ),
    "--mscale": (YARN, f"{YARN} --mscale 0.5"),
    "--mscale-all-dim": (f"{LATENT} {YARN}", f"{LATENT} {YARN} --mscale-all-dim 1"),
    "--window-size": "--window-size 4",
    "--multi-latent-attention": (ROPE, LATENT),
    "--q-lora-rank": (LATENT, f"{LATENT} --q-lora-rank 8"),
    "--kv-lora-rank": (LATENT, f"{LATENT} --kv-lora-rank 12"),
    "--qk-head-dim": (LATENT, f"{LATENT} --qk-head-dim 12"),
    "--qk-pos-emb-head-dim": (LATENT, f"{LATENT} --qk-pos-emb-head-dim 8"),
    "--v-head-dim": (LATENT, f"{LATENT} --v-head-dim 4"),
    "--mtp-num-layers": "--mtp-num-layers 1",
    "--mtp-loss-scaling-factor": ("--mtp-num-layers 1", "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.7"),
    "--max-position-embeddings": "--max-position-embeddings 32",
    "--vocab-size": "--vocab-size 200",
    "--make-vocab-size-divisible-by": "--make-vocab-size-divisible-by 200",
    "--untie-embeddings-and-output-weights": "--untie-embeddings-and-output-weights",
    "--hidden-dropout": "--hidden-dropout 0.3",
    "--attention-dropout": "--attention-dropout 0.3",
    "--init-method-std": "--init-method-std 0.1",
    "--no-scaled-output-init": "--no-scaled-output-init",
    "--mup-base-hidden-size": "--mup-base-hidden-size 16",
    "--norm-epsilon": "--norm-epsilon 0.1",
    "--layernorm-epsilon": "--layernorm-epsilon 0.1",
    "--attention-backend": "--attention-backend math",
    "--bf16": "--bf16",
    "--fp16": "--fp16",
    "--fp64": "--fp64",
    "--num-experts": EXPERTS,
    "--moe-layer-freq": (EXPERTS, f"{EXPERTS} --moe-layer-freq 2"),
    "--moe-ffn-hidden-size": (EXPERTS, f"{EXPERTS} --moe-ffn-hidden-size 24"),
    "--moe-shared-expert-intermediate-size": (EXPERTS, f"{EXPERTS} --moe-shared-expert-intermediate-size 24"),
    "--moe-router-topk": (EXPERTS, f"{EXPERTS} --moe-router-topk 3"),
    "--moe-router-score-function": (EXPERTS, f"{EXPERTS} --moe-router-score-function sigmoid"),
    "--moe-router-pre-softmax": (EXPERTS, f"{EXPERTS} --moe-router-pre-softmax"),
    "--moe-router-num-groups": (f"{MANY} 2", f"{MANY} 4"),
    "--moe-router-group-topk": (f"{MANY} 4", f"{MANY} 4 --moe-router-group-topk 2"),
    "--moe-router-topk-scaling-factor": (EXPERTS, f"{EXPERTS} --moe-router-topk-scaling-factor 2"),
    "--moe-input-jitter-eps": (EXPERTS, f"{EXPERTS} --moe-input-jitter-eps 0.5"),
    "--moe-router-force-load-balancing": (EXPERTS, f"{EXPERTS} --moe-router-force-load-balancing"),
    "--moe-router-load-balancing-type": tuple(
        f"{EXPERTS} --moe-aux-loss-coeff 1 --moe-router-load-balancing-type {x}" for x in ("aux_loss", "seq_aux_loss")
    ),
    "--moe-aux-loss-coeff": (EXPERTS, f"{EXPERTS} --moe-aux-loss-coeff 1"),
    "--moe-z-loss-coeff": (EXPERTS, f"{EXPERTS} --moe-z-loss-coeff 1"),
    "--moe-expert-capacity-factor": (EXPERTS, CAPACITY),
    "--moe-token-drop-policy": (CAPACITY, f"{CAPACITY} --moe-token-drop-policy position"),
}
BLOCK = "--recompute-granularity full --recompute-method block"
SAVED = {
    "--recompute-granularity": "--recompute-granularity full",
    "--recompute-activations": "--recompute-activations",
    "--checkpoint-activations": "--checkpoint-activations",
    "--enable-activation-checkpointing": "--enable-activation-checkpointing",
    "--recompute-method": (
        "--recompute-granularity full --recompute-num-layers 2",
        f"{BLOCK} --recompute-num-layers 2",
    ),
    "--recompute-num-layers": (BLOCK, f"{BLOCK} --recompute-num-layers 1"),
    "--checkpoint-num-layers": (BLOCK, f"{BLOCK} --checkpoint-num-layers 1"),
    "--recompute-modules": ("--recompute-activations", "--recompute-activations --recompute-modules attention mlp"),
    "--recompute-budget": tuple(f"--recompute-activations --recompute-budget {x}" for x in (0, 0.02)),
    "--compress-activations": "--compress-activations bf16",
    "--offload-activations": "--offload-activations",
}
WARM = "--lr-warmup-iters 2 --lr-warmup-init"
WSD = "--lr-decay-style WSD"
RAMP = "--global-batch-size 8 --micro-batch-size 2"
PLAN = {
    "--lr": "--lr 0.5",
    "--min-lr": "--min-lr 1e-4",
    "--lr-decay-style": "--lr-decay-style cosine",
    "--lr-decay-iters": "--lr-decay-iters 4",
    "--lr-decay-samples": "--lr-decay-samples 4",
    "--lr-warmup-iters": "--lr-warmup-iters 3",
    "--lr-warmup-samples": "--lr-warmup-samples 3",
    "--lr-warmup-fraction": "--lr-warmup-fraction 0.5",
    "--lr-warmup-init": (f"{WARM} 0", f"{WARM} 1e-4"),
    "--lr-wsd-decay-iters": (WSD, f"{WSD} --lr-wsd-decay-iters 4"),
    "--lr-wsd-decay-samples": (WSD, f"{WSD} --lr-wsd-decay-samples 4"),
    "--lr-wsd-decay-style": (
        f"{WSD} --lr-wsd-decay-iters 4",
        f"{WSD} --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear",
    ),
    "--weight-decay": "--weight-decay 0.3",
    "--start-weight-decay": tuple(f"--weight-decay-incr-style linear --start-weight-decay {x}" for x in (0, 0.1)),
    "--end-weight-decay": "--end-weight-decay 0.3",
    "--weight-decay-incr-style": tuple(
        f"--start-weight-decay 0 --weight-decay-incr-style {x}" for x in ("linear", "cosine")
    ),
    "--micro-batch-size": "--micro-batch-size 2",
    "--global-batch-size": "--global-batch-size 4",
    "--num-micro-batches": "--num-micro-batches 2",
    "--gradient-accumulation-steps": "--gradient-accumulation-steps 2",
    "--rampup-batch-size": (RAMP, f"{RAMP} --rampup-batch-size 2 2 12"),
    "--train-iters": "--train-iters 9",
}
STEP = {
    "--optimizer": "--optimizer lion",
    "--no-decay": "--no-decay blocks.*",
    "--adam-beta1": "--adam-beta1 0.5",
    "--adam-beta2": "--adam-beta2 0.5",
    "--adam-eps": "--adam-eps 0.1",
    "--sgd-momentum": ("--optimizer sgd", "--optimizer sgd --sgd-momentum 0.5"),
    "--muon-momentum": ("--optimizer muon", "--optimizer muon --muon-momentum 0.5"),
    "--main-params-dtype": ("--bf16", "--bf16 --main-params-dtype bf16"),
    "--main-grads-dtype": ("--bf16", "--bf16 --main-grads-dtype bf16"),
    "--exp-avg-dtype": "--exp-avg-dtype bf16",
    "--exp-avg-sq-dtype": "--exp-avg-sq-dtype bf16",
    "--optimizer-cpu-offload": "--optimizer-cpu-offload",
    "--all-bf16": ("--bf16", "--bf16 --all-bf16"),
    "--loss-scale": ("--fp16", "--fp16 --loss-scale 64"),
    "--initial-loss-scale": ("--fp16", "--fp16 --initial-loss-scale 64"),
    "--min-loss-scale": ("--fp16 --initial-loss-scale 2", "--fp16 --initial-loss-scale 2 --min-loss-scale 2"),
    "--loss-scale-window": ("--fp16", "--fp16 --loss-scale-window 5"),
    "--hysteresis": ("--fp16", "--fp16 --hysteresis 1"),
}
REFUSED = {
    "--use-flash-attn": ("model", "flash attention needs a CUDA GPU"),
    "--fp8-format": ("hybrid", r"fp8 \(--fp8-hybrid\) needs a GPU"),
    "--fp8-hybrid": ("", r"fp8 \(--fp8-hybrid\) needs a GPU"),
    "--fp8-e4m3": ("", r"fp8 \(--fp8-e4m3\) needs a GPU"),
}
PP2 = "--num-layers 4 --pipeline-model-parallel-size 2"
LAYOUT: dict[str, str | tuple[str, str]] = {
    "--tensor-model-parallel-size": "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size": "--pipeline-model-parallel-size 2",
    "--context-parallel-size": "--context-parallel-size 2",
    "--expert-model-parallel-size": (EXPERTS, f"{EXPERTS} --expert-model-parallel-size 2"),
    "--expert-tensor-parallel-size": (EXPERTS, f"{EXPERTS} --expert-tensor-parallel-size 2"),
    "--pipeline-schedule": (PP2, f"{PP2} --pipeline-schedule zbv"),
    "--num-virtual-stages-per-pipeline-rank": (
        f"{PP2} --pipeline-schedule zero_bubble",
        f"{PP2} --pipeline-schedule zero_bubble --num-virtual-stages-per-pipeline-rank 2",
    ),
    "--pipeline-model-parallel-layout": (PP2, f"{PP2} --pipeline-model-parallel-layout Ettt|tL"),
    "--use-distributed-optimizer": "--use-distributed-optimizer",
    "--zero-stage": "--zero-stage 2",
    "--num-distributed-optimizer-instances": (
        "--zero-stage 1",
        "--zero-stage 1 --num-distributed-optimizer-instances 2",
    ),
    "--ddp-bucket-size": "--ddp-bucket-size 1000",
    "--no-overlap": "--no-overlap",
}
OWN_TEST = {
    **dict.fromkeys(
        ("--data-path", "--init-from", "--load", "--grow"), "test_data_flags_that_name_other_data_or_load_weights"
    ),
    "--eod-mask-loss": "test_predictions_made_at_the_end_of_a_document_are_left_out",
    **dict.fromkeys(
        ("--tokenizer-model", "--vocab-file", "--vocab", "--merge-file"), "test_a_tokenizer_that_is_not_there_is_named"
    ),
    **dict.fromkeys(
        ("--compile", "--no-compile", "--no-gradient-accumulation-fusion"),
        "test_what_makes_steps_faster_is_handed_to_the_model",
    ),
    "--cp-comm-type": "test_ranks_that_share_sequences_attend_as_the_flag_says",
    "--tokenizer-type": "test_an_unknown_tokenizer_type_is_named",
    **dict.fromkeys(("--num-workers", "--prefetch"), "test_threads_and_prefetch_change_the_loader_and_not_the_samples"),
    "--sequence-parallel": "test_a_flag_without_effect_here_says_so_and_changes_no_loss",
    "--distributed-backend": "test_the_backend_is_the_one_asked_for_where_a_gpu_is_at_hand",
}
"""Flags that one of the tests below observes by itself."""
FUSED_FLAGS = (
    *("--no-fused-optimizer", "--no-attention-timing"),
    *("--cuda-graph-impl", "--enable-cuda-graph", "--cuda-graph-warmup-steps"),
)
"""Flags that test_fused.py, test_attention_timing.py and test_graphs.py observe."""
EXPERT_FLAGS = (
    *("--moe-token-dispatcher-type", "--moe-shared-expert-overlap", "--moe-expert-kernel", "--moe-grouped-gemm"),
    *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "--moe-pad-expert-input-to-capacity"),
)
"""Flags that test_expert_flags.py observes."""
FP8_FLAGS = (
    *("--fp8-recipe", "--fp8-amax-history-len", "--fp8-amax-compute-algo", "--fp8-margin", "--first-last-layers-bf16"),
    *("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"),
)
"""Flags that test_fp8.py observes."""
KERNEL_FLAGS = (
    *(
        "--transformer-impl",
        "--norm-kernel",
        "--gate-kernel",
        "--rotary-kernel",
        "--loss-kernel",
        "--fp8-kernel",
        "--adam-kernel",
        "--wgrad-kernel",
    ),
)
"""Flags that test_layer_packages.py observes."""
DATA_FLAGS = (
    *("--train-data-path", "--valid-data-path", "--test-data-path", "--data-args-path", "--per-split-data-args-path"),
    *("--mock-data", "--sample-order", "--sample-shuffle", "--sample-packing", "--blend-weights", "--blend-schedule"),
    *("--data-cache-path", "--num-dataset-builder-threads", "--fim-rate", "--fim-spm-rate", "--fim-prefix-token"),
    *("--fim-middle-token", "--fim-suffix-token", "--reset-position-ids", "--reset-attention-mask"),
    *("--dataloader-type", "--dataloader-inter-document-masking"),
)
"""Flags that test_data_flags.py and test_documents_apart.py observe."""

WATCH: dict[str, str | tuple[str, str]] = {
    "--async-save": ("--no-async-save", "--async-save"),
    "--no-async-save": "--no-async-save",
    "--keep-last": "--keep-last 2",
    "--keep-every": "--keep-every 3",
    "--finetune": ("--load x", "--load x --finetune"),
    "--no-load-optim": "--no-load-optim",
    "--no-load-rng": "--no-load-rng",
    "--schedule-from": "--schedule-from command",
    "--override-opt_param-scheduler": "--override-opt_param-scheduler",
    "--override-opt-param-scheduler": "--override-opt-param-scheduler",
    "--use-checkpoint-opt_param-scheduler": "--use-checkpoint-opt_param-scheduler",
    "--use-checkpoint-opt-param-scheduler": "--use-checkpoint-opt-param-scheduler",
    "--tensorboard-dir": "--tensorboard-dir x",
    "--wandb-project": "--wandb-project x",
    "--wandb-entity": "--wandb-entity x",
    "--wandb-exp-name": "--wandb-exp-name x",
    "--profile": "--profile",
    "--profile-step-start": "--profile-step-start 3",
    "--profile-step-end": "--profile-step-end 30",
    "--profile-ranks": "--profile-ranks 0 1",
    "--profile-kernels-only": "--profile --profile-kernels-only",
    "--max-nonfinite-steps": "--max-nonfinite-steps 9",
    "--spike-threshold": "--spike-threshold 4",
    "--spike-window": "--spike-window 32",
    "--exit-duration-in-mins": "--exit-duration-in-mins 5",
    "--exit-interval": "--exit-interval 5",
    "--hang-timeout": "--hang-timeout 60",
    "--straggler-ratio": "--straggler-ratio 2",
}
"""Flags of checkpoints, sinks and guards: what they do is in test_resume.py, test_guards.py and test_profile.py."""
