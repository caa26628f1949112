"""What GPUs can do, as their makers state it: the planner's assumptions about a cluster."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from megaflow.errors import ConfigError
from megaflow_trainer.config.arithmetic import find_peak_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU among its neighbours. Rates are bytes per second, one way."""

    name: str
    memory_gb: float
    """10^9 bytes."""
    memory_rate: float
    link_rate: float
    """To GPUs of the same machine: NVLink, or PCIe where there is none."""
    net_rate: float
    """To other machines: a 400 Gb/s card a GPU for Hopper and newer, 200 Gb/s for A100, 100 Gb/s else."""

    @property
    def peak_flops(self) -> float:
        """Dense bf16 products."""
        peak = find_peak_flops(self.name, "bf16")
        assert peak is not None, "every GPU here has one"
        return peak


GPUS = (
    Gpu(name="H100", memory_gb=80, memory_rate=3.35e12, link_rate=450e9, net_rate=50e9),
    Gpu(name="H200", memory_gb=141, memory_rate=4.8e12, link_rate=450e9, net_rate=50e9),
    Gpu(name="B200", memory_gb=180, memory_rate=8.0e12, link_rate=900e9, net_rate=50e9),
    Gpu(name="A100", memory_gb=80, memory_rate=2.0e12, link_rate=300e9, net_rate=25e9),
    Gpu(name="L40S", memory_gb=48, memory_rate=0.864e12, link_rate=32e9, net_rate=12.5e9),
    Gpu(name="L4", memory_gb=24, memory_rate=0.3e12, link_rate=32e9, net_rate=12.5e9),
    Gpu(name="RTX 4090", memory_gb=24, memory_rate=1.008e12, link_rate=32e9, net_rate=12.5e9),
)


def find_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        ConfigError: if it is not in the table.
    """
    found = next((gpu for gpu in GPUS if gpu.name.lower() == name.lower()), None)
    if found is None:
        near = difflib.get_close_matches(name.upper(), [gpu.name for gpu in GPUS], n=1, cutoff=0.3)
        known = ", ".join(gpu.name for gpu in GPUS)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise ConfigError(f"--gpu {name}: not in the planner's table ({known}){hint}; give the one that is most alike")
    return found
