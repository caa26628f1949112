"""Records checkpoints of tiny models as Megatron-Core writes them, and the losses that its own model computes; one in
the midst of training, with the state of its optimizer and the losses of the steps that follow.

python tests/golden/megatron/make.py [KIND ...], where megatron-core 0.16 is installed beside torch; the tests do not
need it.
On the CPU some of its calls to CUDA are answered here, and torch writes the files that its own writer would.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F

HERE = Path(__file__).parent
NUM_TOKENS, VOCAB, HIDDEN = 8, 24, 16
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def make_model(kind: str) -> Any:
    """A model of Megatron-Core with random weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    is_llama = kind == "llama"
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2 if is_llama else None,
        ffn_hidden_size=24 if is_llama else 64,
        gated_linear_unit=is_llama,
        activation_func=F.silu if is_llama else (lambda x: F.gelu(x, approximate="tanh")),
        add_bias_linear=not is_llama,
        normalization="RMSNorm" if is_llama else "LayerNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=VOCAB,
        max_sequence_length=NUM_TOKENS,
        position_embedding_type="rope" if is_llama else "learned_absolute",
        share_embeddings_and_output_weights=not is_llama,
    )
    generator = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def train(model: Any, optimizer: Any, tokens: torch.Tensor, mask: torch.Tensor, num_steps: int) -> list[float]:
    """Losses of some steps on the same tokens."""
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        logits = model(tokens, torch.arange(NUM_TOKENS)[None], mask)[0]
        loss = F.cross_entropy(logits, tokens[0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def describe_optimizer(model: Any, optimizer: Any, state: Any) -> Any:
    """What Megatron saves of its optimizer."""
    from megatron.core.optimizer.optimizer import FP32Optimizer

    own = FP32Optimizer.__new__(FP32Optimizer)  # what it makes of a GPU's loss scale is not needed
    own.optimizer, own.is_stub_optimizer = optimizer, False
    return own.sharded_state_dict(state)


def record(kind: str) -> None:
    """One folder: the checkpoint, and losses.json."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    model = make_model(kind)
    tokens = torch.arange(NUM_TOKENS)[None] * 5 % VOCAB
    mask = torch.triu(torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(tokens, torch.arange(NUM_TOKENS)[None], mask)[0]
    folder = Path(kind)  # the checkpoint names its folder as it is named here
    shutil.rmtree(folder, ignore_errors=True)
    path = folder / "iter_0000007"
    path.mkdir(parents=True)
    losses = F.cross_entropy(logits, tokens[0], reduction="none").tolist()
    recorded = {"tokens": tokens[0].tolist(), "losses": losses}
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    state = {"model": model.sharded_state_dict(), "args": argparse.Namespace(num_layers=2), "iteration": 7}
    if kind == "trained":
        optimizer = torch.optim.Adam(model.parameters(), **ADAM)
        train(model, optimizer, tokens, mask, 7)
        kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        recorded["losses"] = train(model, optimizer, tokens, mask, 5)  # of the steps behind the checkpoint
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        state["model"] = model.sharded_state_dict()
        state["optimizer"] = describe_optimizer(model, optimizer, state["model"])
    (folder / "losses.json").write_text(json.dumps(recorded) + "\n")
    apply_factories(state)
    sharded, common = extract_matching_values(state, lambda value: isinstance(value, ShardedBase))
    sharded, _, _ = strategy._replace_state_dict_keys_with_sharded_keys(sharded, True)
    planner = strategy.MCoreSavePlanner(dedup_save_to_lowest_rank=True, flatten_state_dict=False)
    ready = strategy.mcore_to_pyt_state_dict(sharded, False)
    dcp.save(ready, storage_writer=dcp.FileSystemWriter(str(path)), planner=planner)
    torch.save(common, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def main() -> int:
    """Record those that are named, or all."""
    os.chdir(HERE)
    import megatron.core.transformer.dot_product_attention as attention
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    tracker = type("Tracker", (), {"fork": staticmethod(lambda *_: nullcontext())})
    attention.tensor_parallel.get_cuda_rng_tracker = lambda *_, **__: tracker
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for kind in sys.argv[1:] or ("gpt", "llama", "trained"):
        record(kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
