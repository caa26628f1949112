"""Flags, recipes, derived sizes and the sentences of faults."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from megaflow.errors import ConfigError, FileAccessError, MissingFileError
from megaflow_trainer.config import TrainConfig, command, fields, format_help, read_command
from megaflow_trainer.config.batch import solve_batch
from megaflow_trainer.config.command import list_flag_names, parse_flags
from megaflow_trainer.config.flags import FLAGS, LEGACY, NOT_BUILT, Flag, NotBuilt
from megaflow_trainer.config.help import DERIVED
from megaflow_trainer.config.sections import BatchSizes, StepConfig

ROOT = Path(__file__).resolve().parents[3]
RUN = ("--train-iters", "10", "--data-path", "corpus")
SAMPLES: dict[Any, tuple[str, Any]] = {
    int: ("3", 3),
    float: ("1e-3", 1e-3),
    str: ("word", "word"),
    tuple[str, ...]: ("corpus", ("corpus",)),
}


def read(*flags: str, world_size: int = 1) -> TrainConfig:
    return read_command([*RUN, *flags], world_size=world_size)[0]


def fault(*flags: str, world_size: int = 1, run: tuple[str, ...] = RUN) -> str:
    with pytest.raises(ConfigError) as caught:
        read_command([*run, *flags], world_size=world_size)
    return str(caught.value)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_sets_its_field(flag: Flag) -> None:
    kind = fields.list_fields()[flag.field].kind
    text, value = (None, flag.constant) if flag.is_switch else SAMPLES[kind]
    if flag.field == "model.preset":
        text = value = "gpt2_small"
    parsed = parse_flags([flag.name] if text is None else [flag.name, text])
    assert parsed.values[flag.field] == value
    assert flag.field == "model.preset" or len(parsed.values) == 1
    assert not parsed.faults
    if text is not None:
        assert parse_flags([f"{flag.name}={text}"]).values == parsed.values


def test_every_field_has_help() -> None:
    assert fields.read_help().keys() == fields.list_fields().keys()


def test_every_field_can_be_set_by_a_flag() -> None:
    assert {flag.field for flag in FLAGS} == set(fields.list_fields())


def test_no_flag_is_in_two_tables() -> None:
    names = list_flag_names()
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", [flag.name for flag in (*FLAGS, *LEGACY)])
def test_torchrun_hands_every_flag_on(name: str) -> None:
    """It reads flags behind the script too, and refuses one that begins like several of its own, as --log would."""
    assert get_args_parser().parse_args(["pretrain.py", name]).training_script_args == [name]


def test_help_names_every_flag() -> None:
    text = format_help()
    assert not [line for line in text.splitlines() if "  " in line[41:].strip()]
    assert all(flag.name in text for flag in FLAGS)


@pytest.mark.parametrize("flag", LEGACY, ids=lambda flag: flag.name)
def test_a_legacy_flag_says_once_that_it_does_nothing(flag: Any) -> None:
    _, notes = read_command([*RUN, flag.name, *(["1"] if flag.takes_value else [])], world_size=1)
    assert notes == ([f"{flag.name} has no effect: {flag.why}"] if flag.why else [])


@pytest.mark.parametrize("feature", NOT_BUILT, ids=lambda feature: feature.feature)
def test_what_is_not_built_is_refused_in_one_sentence(feature: Any) -> None:
    for name in feature.switches:
        assert fault(name) == f"{name}: this version does not have {feature.feature}; {feature.remedy}"
    for name, accepted in feature.valued:
        assert fault(name, "7") == f"{name} 7: this version does not have {feature.feature}; {feature.remedy}"
        for value in accepted:
            assert read(name, value) == read()


def test_flags_of_one_missing_feature_are_refused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NotBuilt(
        "a loss scale a layer", "drop them", switches=("--scale-layers",), valued=(("--layer-scale", ()),)
    )
    monkeypatch.setattr(command, "NOT_BUILT", (missing,))
    assert fault("--scale-layers", "--layer-scale", "2") == (
        "--scale-layers, --layer-scale 2: this version does not have a loss scale a layer; drop them"
    )


@pytest.mark.parametrize("name", ["--main-params-dtype", "--main-grads-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype"])
def test_all_bf16_contradicts_a_wider_dtype(name: str, tmp_path: Path) -> None:
    said = f"--all-bf16 and {name} fp32 contradict each other: the first asks for bf16, give one of them"
    assert fault("--bf16", "--all-bf16", name, "fp32") == fault("--bf16", name, "fp32", "--all-bf16") == said
    assert read("--bf16", "--all-bf16", name, "bf16") == read("--bf16", "--all-bf16")
    recipe, field = tmp_path / "r.yaml", next(flag.field for flag in FLAGS if flag.name == name)
    section, _, leaf = field.partition(".")
    recipe.write_text(f"{section}:\n  {leaf}: fp32\n")
    assert read("--config", str(recipe), "--bf16", "--all-bf16") == read("--bf16", "--all-bf16"), "flags override"
    recipe.write_text(f"step:\n  is_all_bf16: true\n{section}:\n  {leaf}: fp32\n")
    assert f"{field} ({name}) fp32 contradict each other" in fault("--config", str(recipe), "--bf16")
    recipe.write_text("step:\n  is_all_bf16: true\n")
    assert f"and {name} fp32 contradict each other" in fault("--config", str(recipe), "--bf16", name, "fp32")


def test_megatrons_words_for_attention_are_taken() -> None:
    for word, own in (("fused", "cudnn"), ("unfused", "math"), ("local", "math"), ("flash", "flash")):
        config, notes = read_command([*RUN, "--attention-backend", word], world_size=1)
        assert config.model.attention == own
        assert notes == ([] if word == own else [f"--attention-backend {word} is {own} here"])


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--fp8-interval 1", "scales of fp8 follow in every step"),
        ("--te-rng-tracker", "no tracker to choose"),
        ("--no-rope-fusion", "--rotary-kernel chooses"),
        ("--no-bias-swiglu-fusion", "--gate-kernel chooses"),
        ("--cross-entropy-loss-fusion", "--loss-kernel chooses"),
        ("--cross-entropy-fusion-impl te", "--loss-kernel chooses"),
        ("--no-persist-layer-norm", "--norm-kernel chooses"),
        ("--use-precision-aware-optimizer", "--exp-avg-sq-dtype count without it"),
        ("--no-fp8-wgrad", "give --fp8-recipe rowwise, which always keeps them so, or drop the flag"),
    ],
)
def test_a_command_of_megatron_is_answered_by_what_is_done_instead(flags: str, words: str) -> None:
    try:
        (said,) = read_command([*RUN, *flags.split()], world_size=1)[1]
    except ConfigError as error:
        said = str(error)
    assert words in said


def test_an_unknown_flag_names_the_nearest_known_one() -> None:
    assert fault("--lr-warmup-iter", "3") == (
        "--lr-warmup-iter is not a flag of this trainer; the nearest known one is --lr-warmup-iters"
    )


def test_all_faults_are_listed_at_once_with_flag_and_remedy() -> None:
    lines = fault(
        *("--num-attention-heads", "7", "--hidden-dropout", "1.5", "--lr", "fast", "--sede", "1"),
        *("--seq-length", "64", "--max-position-embeddings", "32"),
    ).split("\n")
    heads = "model.hidden_dim (--hidden-size) 768 is not divisible by model.num_heads (--num-attention-heads) 7"
    length = "data.seq_len (--seq-length) 64 is longer than model.max_positions (--max-position-embeddings) 32"
    assert lines == [
        "5 faults in the configuration:",
        "  - --lr takes a number, got 'fast'",
        "  - --sede is not a flag of this trainer; the nearest known one is --seed",
        "  - model.hidden_dropout (--hidden-dropout) must be in [0, 1), got 1.5",
        f"  - {heads}; use 6 or 8 heads",
        f"  - {length}; raise the second or shorten the first",
    ]


def test_a_fault_does_not_bring_others_that_follow_from_it() -> None:
    assert fault("--train-iters", "ten", run=("--data-path", "x")) == "--train-iters takes a whole number, got 'ten'"
    assert "must be >= 1, got 0" in fault("--num-attention-heads", "0")
    assert "divisible" not in fault("--num-attention-heads", "0")


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--bf16", "yes"), "--bf16 takes no value, got yes"),
        (("--lr",), "--lr takes one value, got none"),
        (("--lr", "1", "2"), "--lr takes one value, got 1 2"),
        (("--num-layers", "2.5"), "--num-layers takes a whole number"),
        (
            ("--lr-decay-style", "exotic"),
            "constant, inverse-square-root, WSD, got 'exotic'",
        ),
        (("--split", "9,x"), "data.split (--split) must be up to three weights such as 969,30,1, got '9,x'"),
        (("--mock-data",), "data.path (--data-path) and data.is_mock each name the data; give one of them"),
        (
            ("--sample-packing", "best_fit"),
            "are for samples.order (--sample-order) instant; give --sample-order instant",
        ),
        (("--blend-schedule", "f.json"), "Megatron's order would change from the first sample"),
        (("--min-lr", "1"), "schedule.min_lr (--min-lr) 1.0 is above optim.lr (--lr) 0.0003; lower it"),
        (("--lr-warmup-iters", "5", "--lr-warmup-fraction", ".1"), "are one setting; give one of them"),
        (("--lr-warmup-iters", "5", "--lr-decay-iters", "5"), "must be below schedule.decay_steps"),
        (("--train-samples", "80"), "are two lengths of one run; give one of them"),
        (("--gradient-accumulation-steps", "4", "--num-micro-batches", "2"), "contradict each other"),
    ],
)
def test_the_sentence_of_a_fault(flags: tuple[str, ...], words: str) -> None:
    assert words in fault(*flags)


def test_missing_length_and_data_are_said() -> None:
    text = fault(run=())
    assert "the run has no length; give num_steps (--train-iters) or num_samples (--train-samples)" in text
    assert "data.path (--data-path) is missing" in text


def test_too_few_ranks_for_a_replica_is_said_with_the_numbers() -> None:
    assert "3 ranks cannot be divided into replicas of tp x cp x pp = 2 x 1 x 1 = 2 ranks; start 2 or 4" in fault(
        "--tensor-model-parallel-size", "2", world_size=3
    )


@pytest.mark.parametrize(
    "given, dp, sizes",
    [
        ({}, 4, (1, 4, 1)),
        ({"micro_batch_size": 2}, 4, (2, 8, 1)),
        ({"global_batch_size": 32}, 4, (1, 32, 8)),
        ({"num_micro_batches": 3}, 2, (1, 6, 3)),
        ({"micro_batch_size": 4, "global_batch_size": 32}, 2, (4, 32, 4)),
        ({"micro_batch_size": 4, "num_micro_batches": 4}, 2, (4, 32, 4)),
        ({"global_batch_size": 32, "num_micro_batches": 4}, 2, (4, 32, 4)),
        ({"micro_batch_size": 4, "global_batch_size": 32, "num_micro_batches": 4}, 2, (4, 32, 4)),
    ],
)
def test_any_consistent_part_of_the_batch_determines_the_rest(
    given: dict[str, Any], dp: int, sizes: tuple[int, int, int]
) -> None:
    assert solve_batch(StepConfig(**given), dp=dp) == BatchSizes(*sizes)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"micro_batch_size": 4, "global_batch_size": 30}, "30 = 4 x 2 x accumulation; choose a multiple of 8"),
        ({"global_batch_size": 30, "num_micro_batches": 4}, "30 = micro x 2 x 4; choose a multiple of 8"),
        ({"micro_batch_size": 4, "global_batch_size": 32, "num_micro_batches": 2}, "32 != 4 x 2 x 2 = 16"),
        ({"micro_batch_size": 4, "global_batch_size": 4}, "such as 8"),
    ],
)
def test_a_contradiction_shows_the_equation(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="global batch = micro batch x data-parallel ranks x accumulation") as caught:
        solve_batch(StepConfig(**given), dp=2)
    assert words in str(caught.value)


def test_samples_become_whole_steps() -> None:
    config, _ = read_command(["--data-path", "x", "--train-samples", "85", "--global-batch-size", "8"], world_size=1)
    assert config.num_steps == 10


def test_derived_fields_are_filled_in() -> None:
    config = read("--hidden-size", "96", "--seq-length", "32", "--run-name", "small")
    assert (config.model.ffn_dim, config.model.max_positions, config.log.run_dir) == (384, 32, "runs/small")
    assert read("--save", "here").log.run_dir == "here"


def test_vocab_is_vocab_file_and_says_what_it_is_taken_for() -> None:
    config, notes = read_command([*RUN, "--vocab", "vocab.txt", "--merge-file", "m.txt"], world_size=1)
    assert config.data.vocab_file == "vocab.txt"
    assert notes == ["vocabulary and merges without --tokenizer-type: taken as a GPT-2 byte-level BPE"]


def test_a_flag_overrides_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("num_steps: 7\noptim:\n  lr: 3e-4\n  clip_grad: 0.5\n")
    config, _ = read_command(["--lr", "1e-5", "--config", str(recipe), "--data-path", "x"], world_size=1)
    assert (config.num_steps, config.optim.lr, config.optim.clip_grad) == (7, 1e-5, 0.5)


def test_a_recipe_with_an_unknown_field_names_the_nearest(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model:\n  num_layer: 2\n  num_heads: many\n")
    text = fault("--config", str(recipe))
    assert "model.num_layer is not a field; the nearest known one is model.num_layers" in text
    assert "takes a whole number, got 'many'" in text


def test_a_preset_is_below_the_recipe_and_the_recipe_below_the_flags(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model:\n  preset: llama3_8b\n  num_layers: 2\n  num_heads: 16\n")
    model = read("--config", str(recipe), "--num-attention-heads", "8").model
    assert (model.hidden_dim, model.num_layers, model.num_heads, model.activation) == (4096, 2, 8, "swiglu")
    assert read("--preset", "gpt2_xl").model.num_layers == 48
    assert "model.preset (--preset) 'lama3_8b' is not known; the nearest known one is llama3_8b" in fault(
        "--preset", "lama3_8b"
    )


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            ("--num-query-groups", "5"),
            "is not divisible by model.num_kv_heads (--num-query-groups) 5; use 4 or 6 groups",
        ),
        (("--loss-scale", "8"), "step.loss_scale (--loss-scale) is for fp16, and this run is fp32"),
        (
            ("--recompute-method", "block"),
            "(--recompute-granularity) full, and it is none",
        ),
        (("--checkpoint-activations", "--recompute-num-layers", "13"), "is above model.num_layers (--num-layers) 12"),
        (("--recompute-modules", "attention", "router"), "must be among attention, mlp, attention_norm, mlp_norm, "),
        (("--recompute-modules", "mlp"), "recompute.modules (--recompute-modules) is for recompute.granularity"),
        (("--recompute-budget", "0.1"), "and it is none; give selective or drop it"),
        (("--recompute-activations", "--recompute-budget", "-1"), "(--recompute-budget) must be >= 0, got -1.0"),
        (
            ("--recompute-activations", "--recompute-budget", "0.1", "--recompute-modules", "mlp"),
            "are two ways to choose parts; give one of them",
        ),
        (("--mscale-all-dim", "1"), "(--mscale-all-dim) is for model.is_latent; give that or drop this"),
        (("--mscale", "0.5"), "are for model.rotary_scaling (--rotary-scaling) yarn"),
        (("--fp8-format", "e5m2"), "step.fp8 (--fp8-format) must be one of none, hybrid, e4m3, got 'e5m2'"),
        (("--all-bf16",), "is for bf16, and this run is fp32; give --bf16 or drop it"),
        (("--rampup-batch-size", "2", "2"), "takes three whole numbers, first batch, increment and samples, got 2 2"),
        (("--rampup-batch-size", "3", "2", "9", "--global-batch-size", "8"), "the increments must meet the full batch"),
        (("--multi-latent-attention",), "give model.position_kind (--position-embedding-type) rope"),
        (("--position-embedding-type", "rope", "--rotary-percent", "2"), "must be in (0, 1], got 2.0"),
        (("--position-embedding-type", "alibi"), "must be one of learned_absolute, rope, none"),
        (("--rotary-scaling", "yarn"), "needs model.rotary_factor (--rotary-scaling-factor) above 1"),
        (("--normalization", "BatchNorm"), "must be one of LayerNorm, RMSNorm"),
        (("--rotary-base", "1"), "model.rotary_base (--rotary-base) 1 turns all pairs of channels alike"),
        (("--seq-length", "4", "--mtp-num-layers", "4"), "predicts 4 tokens beyond the next one, and data.seq_len"),
        (("--fp16", "--initial-loss-scale", "4", "--min-loss-scale", "8"), "8.0 is above step.initial_loss_scale"),
        (("--adam-eps", "0"), "divides 0 by 0 where a token has not occurred yet"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(flags: tuple[str, ...], words: str) -> None:
    assert words in fault(*flags)


def test_a_missing_or_broken_recipe_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"--config .*: no such recipe"):
        read_command(["--config", str(tmp_path / "none.yaml")], world_size=1)
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "not YAML" in fault("--config", str(tmp_path / "bad.yaml"))
    (tmp_path / "list.yaml").write_text("- 1")
    assert "expected sections with fields, found a list" in fault("--config", str(tmp_path / "list.yaml"))


def test_a_recipe_that_is_no_text_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="expected a YAML recipe, but: Is a directory"):
        read_command(["--config", str(tmp_path)], world_size=1)
    for content in (b"\xff\xfe\x00", b"\x7fELF\x02\x00\x00\xb0"):
        (tmp_path / "binary.yaml").write_bytes(content)
        assert fault("--config", str(tmp_path / "binary.yaml")).startswith(f"--config {tmp_path}/binary.yaml: ")


FLOATS = [flag.name for flag in FLAGS if fields.list_fields()[flag.field].kind is float]


@pytest.mark.parametrize("flag", FLOATS)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400", "Infinity"])
def test_a_number_that_is_not_finite_is_refused(flag: str, value: str) -> None:
    assert fault(flag, value) == f"{flag} takes a finite number, got {value!r}"


@pytest.mark.parametrize("split", ["inf,1,1", "nan,1,1", "1,nan,1", "1e400"])
def test_weights_that_are_not_finite_are_refused(split: str) -> None:
    assert "must be up to three weights such as 969,30,1" in fault("--split", split)


def test_help_says_derived_only_of_what_is_derived() -> None:
    text = " ".join(format_help().split())
    assert text.count("[derived]") == sum(flag.field in DERIVED and not flag.is_switch for flag in FLAGS)
    for name in DERIVED:
        assert fields.list_fields()[name].default is None
    assert "A tokenizer.json, or the folder with one. [none]" in text
    assert "torchrun adds a report of its own; the `error:` line before it is the reason" in text


def test_the_resolved_configuration_reads_back_as_itself() -> None:
    config = read("--bf16", "--global-batch-size", "8", "--lr-warmup-fraction", "0.1")
    flat = {
        f"{section}.{name}" if isinstance(value, dict) else section: inner
        for section, value in fields.to_dict(config).items()
        for name, inner in (value.items() if isinstance(value, dict) else [("", value)])
    }
    assert fields.build(flat) == (config, [])


def test_configuration_is_read_without_torch() -> None:
    code = "import sys, megaflow_trainer.config; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), check=False)
    assert done.returncode == 0


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}


TEXTS = [flag.name for flag in FLAGS if fields.list_fields()[flag.field].kind is str and not flag.is_switch]


@pytest.mark.parametrize("flag", TEXTS)
def test_an_empty_text_is_refused(flag: str, tmp_path: Path) -> None:
    for text in ("", " "):
        assert f"{flag} takes a text that is not empty, got {text!r}" in fault(flag, text)
    (tmp_path / "r.yaml").write_text("checkpoint: {save: ''}", encoding="utf-8")
    assert "checkpoint.save (--save) takes a text that is not empty, got ''" in fault(
        "--config", str(tmp_path / "r.yaml")
    )
    assert fault("--data-path", "") == "--data-path takes texts that are not empty, got ['']"


def test_a_flag_with_one_dash_or_underscores_names_the_nearest() -> None:
    assert fault("-lr", "3") == "-lr is not a flag of this trainer; the nearest known one is --lr"
    assert fault("--num_layers", "3").endswith("the nearest known one is --num-layers")
    assert fault("--foo") == "--foo is not a flag of this trainer"
    assert read("--lr", "1e-3", "--rotary-base", "5").optim.lr == 1e-3


def test_no_batches_of_evaluation_are_no_evaluation() -> None:
    assert read("--eval-interval", "5", "--eval-iters", "0").eval.every == 0
    assert read("--eval-interval", "5", "--eval-iters", "1").eval.every == 5


def test_divisors_near_a_huge_number_are_found_at_once() -> None:
    assert "use 1 or " in fault("--hidden-size", "9999991", "--num-attention-heads", "2")


@pytest.mark.parametrize(
    "flags, note",
    [
        ("--rotary-base 5000", r"\(--rotary-base\) has no effect without --position-embedding-type rope"),
        ("--rotary-scaling linear --rotary-scaling-factor 2", r"\(--rotary-scaling\) has no effect without"),
        ("--kv-lora-rank 64", r"\(--kv-lora-rank\) has no effect without multi-latent attention"),
        ("--lr-wsd-decay-iters 3", r"\(--lr-wsd-decay-iters\) has no effect without --lr-decay-style WSD"),
        ("--start-weight-decay 0.1", r"\(--start-weight-decay\) has no effect without --weight-decay-incr-style"),
        ("--hysteresis 3", r"\(--hysteresis\) has no effect without --fp16"),
        ("--moe-router-force-load-balancing", "model.is_router_random has no effect without --num-experts"),
        ("--profile-kernels-only", "log.profiles_kernels_only has no effect without --profile"),
    ],
)
def test_a_setting_of_something_that_is_off_says_that_it_changes_nothing(flags: str, note: str) -> None:
    run = ["--data-path", "x", "--train-iters", "5"]
    _, plain = read_command(run, world_size=1)
    _, notes = read_command([*run, *flags.split()], world_size=1)
    assert not any("has no effect without" in line for line in plain)
    assert any(re.search(note, line) for line in notes), notes


def test_an_attention_backend_that_does_not_exist_is_among_the_faults() -> None:
    names = "auto, sdpa, flash, cudnn, math, flash_attn_4, flash_attn_2, transformer_engine"
    with pytest.raises(ConfigError, match=rf"model.attention .*must be one of {names}, got 'foo'"):
        read_command(["--data-path", "x", "--train-iters", "5", "--attention-backend", "foo"], world_size=1)
