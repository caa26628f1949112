"""The name under which Megatron's users know `trainer/pretrain.py`."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "trainer"))
runpy.run_path(f"{sys.path[0]}/pretrain.py", run_name="__main__")
