#!/usr/bin/env python3
"""What a checkpoint costs a run on GPUs: the wait at the save, and the steps beside the writing.

    python3 benches/gpu/checkpoint.py --data PREFIX [--ranks 2] [ROW] [--flags="--use-distributed-optimizer"]

Two runs of a row of `train.py` in turn, one that writes in the background (`--async-save`, the default) and one that
does not, each saving once in the middle. Prints the bytes, the seconds in which training stood still, those of the
writing, and the median step before the save beside those while it was written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rows import COMMON, ROWS

ROOT = Path(__file__).resolve().parents[2]


def measure(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run of `2 save_at` steps or more, saving at `save_at` and at its end."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        save_at, last = options.save_at, 2 * options.save_at
        words = f"--train-iters {last} --log-interval 1 --save-interval {save_at} --save {folder} {kind}"
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}"]
        script = str(ROOT / "trainer" / "pretrain.py")
        flags = f"{ROWS[options.row].shape} {COMMON} {options.flags} --data-path {options.data} {words}".split()
        done = subprocess.run([sys.executable, *ranks, script, *flags], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"kind": kind, "error": (done.stderr or done.stdout)[-1500:]}
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = {line["iteration"]: line for line in lines if "lm_loss" in line}
        saves = [line for line in lines if line.get("event") == "checkpoint"]
        size = sum(path.stat().st_size for path in Path(folder, f"iter_{save_at:07d}").rglob("*") if path.is_file())
        before = [steps[step]["step_time_s"] for step in steps if save_at // 2 < step <= save_at]
        after = [steps[step]["step_time_s"] for step in steps if step > save_at]
        return {
            "kind": kind,
            "bytes": size,
            "stood_still_s": sum(line.get("checkpoint_s", 0.0) for line in steps.values() if line["iteration"] < last),
            "write_s": saves[0].get("write_s") if saves else None,
            "step_before_s": statistics.median(before),
            "step_after_s": statistics.median(after),
            "steps_after_s": [round(value, 4) for value in after],
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("row", nargs="?", default="gpt-1.3b-mbs8", choices=sorted(ROWS))
    parser.add_argument("--data", required=True, metavar="PREFIX", help="a .bin/.idx pair of GPT-2's vocabulary")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of the run (default: 2)")
    parser.add_argument("--flags", default="--use-distributed-optimizer", help="more flags of the run")
    parser.add_argument("--save-at", type=int, default=10, help="iteration of the save (default: 10)")
    parser.add_argument("--folder", help="where checkpoints are written for a moment (default: the temporary folder)")
    options = parser.parse_args()
    for kind in ("--async-save", "--no-async-save"):
        print(json.dumps(measure(kind, options)), flush=True)


if __name__ == "__main__":
    main()
