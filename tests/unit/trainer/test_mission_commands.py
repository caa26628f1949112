"""The command lines that users bring from Megatron, sizes reduced: what each does in this version."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from megaflow.errors import ConfigError
from megaflow_trainer.config import read_command
from megaflow_trainer.config.command import list_flag_names

ROOT = Path(__file__).resolve().parents[3]
NOT_OURS = {  # flags of the preprocessing tool, torchrun, docker and Slurm
    *("--append-eod", "--input", "--output-prefix", "--workers", "--master_addr", "--master_port", "--nnodes"),
    *("--node_rank", "--nproc_per_node", "--gpus", "--gpus-per-node", "--nodes", "--shm-size", "--ulimit"),
}

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 64"
FIRST = (
    f"{MODEL} --micro-batch-size 4 --global-batch-size 32 --train-iters 20 --lr 3e-4 --lr-warmup-iters 2 --min-lr 1e-5 "
    "--lr-decay-style cosine --tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt "
    "--data-path corpus_text_document --save D --load D --save-interval 5 --log-interval 10 --bf16"
)
SECOND = (
    f"{MODEL} --micro-batch-size 4 --global-batch-size 32 --train-iters 50 --lr-decay-iters 32 --save D --load D "
    "--data-path my_data --vocab vocab.txt --merge-file merges.txt --data-impl mmap --split 949,50,1 "
    "--distributed-backend nccl --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --weight-decay 1e-2 "
    "--clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 100 --save-interval 10000 --eval-interval 1000 "
    "--eval-iters 10"
)
THIRD = (
    f"{MODEL} --context-parallel-size 1 --sequence-parallel --micro-batch-size 1 --global-batch-size 16 --lr 3e-4 "
    "--train-iters 100 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --clip-grad 1.0 --bf16 "
    "--use-mcore-models --data-path data --vocab-file vocab.json --merge-file merges.txt"
)


def test_the_lines_run_on_data_parallel_ranks() -> None:
    first, _ = read_command(FIRST.split(), world_size=4)
    assert (first.step.num_micro_batches, first.model.max_positions, first.schedule.warmup_steps) == (2, 64, 2)
    second, notes = read_command(SECOND.split(), world_size=8)
    assert (second.step.num_micro_batches, second.optim.lr, second.schedule.warmup_fraction) == (1, 0.00015, 0.01)
    assert any("--data-impl has no effect" in note for note in notes)
    third, notes = read_command(THIRD.split(), world_size=8)
    assert third.step.num_micro_batches == 2
    assert any("--sequence-parallel has no effect" in note for note in notes)
    assert any("--use-mcore-models has no effect" in note for note in notes)


@pytest.mark.parametrize(
    "flags, feature",
    [
        ("--bf16 --fp8-hybrid --fp8-param-gather", "weights that are kept in fp8"),
    ],
)
def test_what_this_version_does_not_have_is_one_sentence(flags: str, feature: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_command([*SECOND.split(), *flags.split()], world_size=8)
    assert f"this version does not have {feature}; " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensor_parallel_lines_are_laid_out_or_say_how_many_ranks_they_take() -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --use-distributed-optimizer"
    config, _ = read_command([*FIRST.split(), *flags.split()], world_size=4)
    assert (config.step.num_micro_batches, config.parallel.tp, config.parallel.zero) == (4, 2, 1)
    with pytest.raises(ConfigError, match="ranks"):
        read_command([*FIRST.split(), *flags.split()], world_size=3)


def test_the_line_with_experts_is_read() -> None:
    flags = "--num-experts 8 --expert-model-parallel-size 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
    words = [word for word in SECOND.split() if word not in ("--save", "--load", "D")]
    config, _ = read_command([*words, *flags.split()], world_size=8)
    assert (config.model.num_experts, config.model.router_top_k, config.model.aux_loss_scale) == (8, 2, 0.01)
    assert config.parallel.ep == 4


def test_accumulation_in_both_spellings_and_a_cyclic_sampler() -> None:
    flags = "--dataloader-type cyclic --num-workers 4 --gradient-accumulation-steps 4 --num-micro-batches 4"
    config, notes = read_command(["--train-iters", "3", "--data-path", "x", *flags.split()], world_size=2)
    assert (config.step.global_batch_size, config.data.num_threads, config.data.order) == (8, 4, "cyclic")
    assert not any("cyclic" in note for note in notes)


@pytest.mark.parametrize(
    "flags, granularity, method",
    [
        ("--enable-activation-checkpointing", "full", "uniform"),
        ("--checkpoint-activations --checkpoint-num-layers 1", "full", "uniform"),
        ("--recompute-granularity full --recompute-method block", "full", "block"),
        ("--recompute-activations", "selective", None),
    ],
)
def test_recompute_in_every_spelling(flags: str, granularity: str, method: str | None) -> None:
    config, _ = read_command([*SECOND.split(), *flags.split()], world_size=8)
    assert (config.recompute.granularity, config.recompute.method) == (granularity, method)


def test_fp16_with_a_static_loss_scale() -> None:
    config, _ = read_command([*SECOND.split(), "--fp16", "--loss-scale", "4096"], world_size=8)
    assert (config.step.dtype, config.step.loss_scale) == ("fp16", 4096.0)


@pytest.mark.parametrize("rank", ["--local-rank=0", "--local_rank=0", "--local_rank 0"])
def test_both_spellings_of_the_launchers_rank_are_accepted_in_silence(rank: str) -> None:
    _, notes = read_command([*rank.split(), "--train-iters", "3", "--data-path", "x"], world_size=1)
    assert notes == []


SHARED = Path(os.environ.get("MEGAFLOW_SHARED", ROOT.parent / "shared"))
SHELL = {"TP": "2", "PP": "1", "CP": "1", "NUM_LAYERS": "4", "HIDDEN_SIZE": "32", "NUM_HEADS": "4", "SEQ_LEN": "16"}
SHELL |= {"MICRO_BATCH": "1", "GLOBAL_BATCH": "16", "LR": "3e-4"}


def find_seed_commands() -> list[list[str]]:
    """The flags after pretrain_gpt.py in every article, shell variables replaced by small numbers."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((SHARED / "seeds").glob("*.txt"))]
    after = [part.split() for text in texts for part in text.split("pretrain_gpt.py")[1:]]
    commands = [take_flags([word for word in words if word != "\\"]) for words in after]
    return [command for command in commands if len(command) > 8]


def take_flags(words: list[str]) -> list[str]:
    """The words up to the first that is neither a flag nor a flag's value."""
    taken: list[str] = []
    for word in words:
        is_value = bool(taken) and taken[-1].startswith("--") and word.isascii()
        if not word.startswith("--") and not is_value:
            break
        taken.append(SHELL.get(word[1:], "1") if word.startswith("$") else word)
    return taken


@pytest.mark.skipif(not (SHARED / "seeds").exists(), reason="MEGAFLOW_SHARED names no folder with seeds/")
def test_every_training_line_of_the_articles_is_read_or_refused_for_what_is_not_built() -> None:
    commands = find_seed_commands()
    assert len(commands) >= 3
    for flags in commands:
        try:
            read_command(flags, world_size=8)
        except ConfigError as error:
            for line in str(error).removeprefix("error: ").split("\n"):
                assert "this version does not have" in line or "faults in the configuration" in line, (flags, line)


@pytest.mark.skipif(not (SHARED / "seeds").exists(), reason="MEGAFLOW_SHARED names no folder with seeds/")
def test_every_flag_that_the_articles_name_in_passing_is_known() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((SHARED / "seeds").glob("*.txt"))]
    named = {flag for text in texts for flag in re.findall(r"--[a-z][a-z0-9_-]+[a-z0-9]", text)}
    assert named - set(list_flag_names()) - NOT_OURS == set()
