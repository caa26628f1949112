"""Throughput of a step as samples, tokens, FLOPs and parts of the device's peak."""

from __future__ import annotations

from megaflow_trainer.config.arithmetic import count_flops_per_token, find_peak_flops, name_precision
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.manifest import describe_device


def measure_speed(config: TrainConfig, mesh: Mesh, samples_per_s: float) -> dict[str, float]:
    """Rates by the names that the log gives them.

    MFU is FLOPs per second over the dense peak of the device in the precision of the run, once with all of attention
    counted and once with what a causal mask leaves of it; on a device whose peak is not known there is none.
    """
    tokens_per_s = samples_per_s * config.data.seq_len / mesh.world_size
    full, causal = (
        count_flops_per_token(config.model, seq_len=config.data.seq_len, is_causal=is_causal)
        for is_causal in (False, True)
    )
    speed = {
        "samples_per_s": samples_per_s,
        "tokens_per_s_per_gpu": tokens_per_s,
        "tflops_per_gpu": full * tokens_per_s / 1e12,
    }
    peak = find_peak_flops(describe_device(mesh.device), name_precision(config.step))
    if peak is not None:
        speed |= {"mfu": full * tokens_per_s / peak, "mfu_causal": causal * tokens_per_s / peak}
    return speed
