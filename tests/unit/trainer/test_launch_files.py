"""The examples for Slurm and Kubernetes: their form, and that the trainer takes their flags for so many ranks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_trainer.config import read_command
from megaflow_trainer.config.layout import make_layout

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ROOT / "examples" / "launch"
BATCH = ROOT / "trainer" / "recipes" / "llama_70b_64gpu.sbatch"


def read_kinds(name: str) -> dict[str, Any]:
    return {part["kind"]: part for part in yaml.safe_load_all((LAUNCH / name).read_text(encoding="utf-8"))}


def check_command(words: list[str], *, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    own = words[words.index("trainer/pretrain.py") + 1 :]
    config, notes = read_command([word for word in own if not word.startswith("--save")], world_size=world_size)
    layout = make_layout(config.parallel, world_size=world_size)
    assert (layout.dp, layout.dp_shard) == (world_size, world_size)
    assert notes == []
    assert config.samples.cache_dir == "/cache"


def check_mounts(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_job_starts_an_agent_a_pod_that_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = read_kinds("kubernetes-job.yaml")
    service, job = kinds["Service"], kinds["Job"]
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(word[2:].split("=") for word in container["args"] if word.startswith("--") and "=" in word)
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(options["nnodes"])
    assert int(options["nproc_per_node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert options["rdzv-endpoint"].split(":")[0] == f"{name}-0.{pod['subdomain']}"
    check_mounts(pod)
    check_command(container["args"], world_size=16, monkeypatch=monkeypatch)


def test_the_operators_job_has_as_many_workers_as_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_kinds("pytorchjob.yaml")["PyTorchJob"]["spec"]
    worker, elastic = spec["pytorchReplicaSpecs"]["Worker"], spec["elasticPolicy"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert worker["replicas"] == elastic["minReplicas"] == elastic["maxReplicas"]
    assert int(spec["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert container["name"] == "pytorch"
    check_mounts(pod)
    check_command(container["args"], world_size=16, monkeypatch=monkeypatch)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize("is_late", [False, True], ids=["to_its_end", "signalled"])
def test_the_batch_script_runs_the_step_and_queues_itself_again_if_it_is_late(tmp_path: Path, is_late: bool) -> None:
    """With stand-ins for Slurm's commands that write down how they were called."""
    stand_ins = {
        "scontrol": 'if [ "$1" = show ]; then echo node7; sleep 0.2; seq -f node%g 8 40000; '
        'else echo "$@" >> "$CALLS"; fi',  # still writing when the first line has been read
        "srun": 'echo "$@" >> "$CALLS"; sleep 30 & trap "kill $!; exit 143" TERM; kill -USR1 $PPID; wait'
        if is_late
        else 'echo "$@" >> "$CALLS"; exit 3',
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "DATA": "d",
        "SAVE": "s",
        "SLURM_JOB_NODELIST": "node[7-14]",
        "SLURM_JOB_NUM_NODES": "8",
        "SLURM_JOB_ID": "42",
    }
    done = subprocess.run(["bash", str(BATCH), "--lr", "1e-4"], env=environment, capture_output=True, timeout=60)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "--nnodes=8 --nproc_per_node=8" in calls[0]
    assert "--rdzv-endpoint=node7:29500 --rdzv-id=42.0" in calls[0]
    assert calls[0].endswith("llama_70b_64gpu.yaml --data-path d --save s --lr 1e-4")
    assert done.returncode == (0 if is_late else 3)
    assert calls[1:] == (["requeue 42"] if is_late else [])
