"""How a run ends, as a number. With several ranks torchrun itself ends with 1 and reports the ranks' codes; run.json
keeps the code of the first rank.
"""

from __future__ import annotations

FINISHED = 0
FAULT = 1
BAD_CONFIG = 2
STOPPED = 75
OUT_OF_TIME = 76
HUNG = 77
RANK_LOST = 78
OUT_OF_MEMORY = 79
DIVERGED = 80
INTERRUPTED = 130

MEANINGS = {
    FINISHED: "finished",
    FAULT: "fault",
    BAD_CONFIG: "fault of the configuration",
    STOPPED: "stopped by SIGTERM or SIGUSR1 and saved: the same command goes on",
    OUT_OF_TIME: "stopped by --exit-duration-in-mins or --exit-interval and saved: the same command goes on",
    HUNG: "no progress for --hang-timeout seconds: stacks in the run folder",
    RANK_LOST: "another rank died",
    OUT_OF_MEMORY: "out of memory",
    DIVERGED: "loss or gradient not finite --max-nonfinite-steps times in a row",
    INTERRUPTED: "Ctrl-C",
}
"""What each code says."""
