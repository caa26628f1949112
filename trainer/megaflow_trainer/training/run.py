"""The run: build everything once, then one line a verb."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megaflow.errors import FileAccessError
from megaflow_trainer.checkpoint.saver import Saver
from megaflow_trainer.checkpoint.store import Keeping
from megaflow_trainer.config.exit_codes import FINISHED, OUT_OF_TIME, STOPPED
from megaflow_trainer.config.sections import TrainConfig
from megaflow_trainer.ops.attention import prefer_kernels
from megaflow_trainer.parallel.collectives import own_group
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.training.build import Run, set_up
from megaflow_trainer.training.clock import CHECKPOINT, COMMUNICATION, EVAL, LOG
from megaflow_trainer.training.data import build_train_loader, open_data, with_vocabulary
from megaflow_trainer.training.evaluate import evaluate
from megaflow_trainer.training.ledger import Ledger, StepResult
from megaflow_trainer.training.lock import hold_folders
from megaflow_trainer.training.manifest import Ending, record_end
from megaflow_trainer.training.metrics import MetricsLog
from megaflow_trainer.training.oom import explain_shortage
from megaflow_trainer.training.preflight import refuse_device
from megaflow_trainer.training.profile import Profiler
from megaflow_trainer.training.say import say
from megaflow_trainer.training.step import train_step
from megaflow_trainer.training.stop import Stop, StopVote
from megaflow_trainer.training.watchdog import Watchdog


def train(config: TrainConfig, mesh: Mesh, notes: Sequence[str] = (), ending: Ending | None = None) -> int:
    """Train as the configuration says, from the last complete checkpoint on.

    Args:
        config: what to train, and how.
        mesh: the ranks.
        notes: lines for the log.
        ending: is filled in with how far the run got and how it ended.

    Returns:
        An exit code: finished, or stopped and to be started again.

    Raises:
        MegaflowError: whatever the user, the files or the cluster got wrong, in one sentence.
    """
    limit = config.guard.exit_minutes
    deadline_s = None if limit is None else time.monotonic() + 60 * limit
    refuse_device(config, mesh.device)
    data, ending = open_data(config), ending or Ending()
    config = with_vocabulary(config, data)
    with (
        hold_folders(config, mesh),
        explain_shortage(config, mesh.device),
        prefer_kernels(mesh.device),
        build_train_loader(data, config, mesh) as loader,
    ):
        run = set_up(config, data, loader, mesh, [*notes, *data.notes])
        with record_end(run.folder, mesh, ending), open_saver(run) as saver:
            ending.exit_code = loop(run, saver, ending, deadline_s)
            ending.reason = "finished" if ending.exit_code == FINISHED else "stopped, to be started again"
        if ending.exit_code == FINISHED:
            tell_next(run)
        return ending.exit_code


def loop(run: Run, saver: Saver | None, ending: Ending, deadline_s: float | None) -> int:
    """All steps that are left; returns the exit code."""
    config, mesh, clock = run.config, run.mesh, run.clock
    consumed, ledger = run.feed.consumed_samples, Ledger(clock)
    with (
        StopVote(mesh, deadline_s=deadline_s) as vote,
        MetricsLog(config, mesh) as log,
        Profiler(config, mesh, clock) as profiler,
        Watchdog(clock, run.folder, mesh.rank, hang_s=config.guard.hang_s, ending=ending),
    ):
        ending.has_begun = True
        clock.restart()
        for step in range(run.start.step + 1, config.last_step + 1):
            clock.step = step
            profiler.before(step)
            with clock.phase(LOG):
                run.guard.documents.mark(run.feed)
                plan = run.planner.plan(consumed)
            consumed += plan.num_samples
            report = train_step(
                run.state.model,
                run.state.optimizer,
                run.feed,
                mesh,
                clock,
                config,
                plan=plan,
                has_norm=log.is_due(step),
            )
            profiler.after(step)
            write_down(run, log, ledger.add(step, consumed, report))
            ending.iteration = step
            if run.data.valid and is_due(step, config.eval.every, config.last_step):
                write_down(run, log, ledger.flush())
                with clock.phase(EVAL):
                    log.write_validation(step, evaluate(run.state.model, run.data, config, mesh, clock))
            stop = find_stop(run, vote, saver, step)
            if saver and (stop or is_due(step, config.checkpoint.every, config.last_step)):
                write_down(run, log, ledger.flush())
                with clock.phase(CHECKPOINT):
                    saver.start(step, run.state.list_held(mesh), run.state.describe(config, mesh))
            tell_saved(mesh, log, saver)
            if stop and step < config.last_step:
                write_down(run, log, ledger.flush())
                return leave(run, log, saver, stop, vote, step)
        write_down(run, log, ledger.flush())
        if saver:
            saver.finish()
            tell_saved(mesh, log, saver)
    return FINISHED


def write_down(run: Run, log: MetricsLog, results: Sequence[StepResult]) -> None:
    """Judge and log steps whose numbers have arrived.

    Raises:
        DivergedError: on all ranks, after too many bad steps in a row.
    """
    with run.clock.phase(LOG):
        for result in results:
            event = run.guard.judge(result)
            log.write_event(event)
            log.write(result)
            run.guard.check(event)


def find_stop(run: Run, vote: StopVote, saver: Saver | None, step: int) -> Stop:
    """Whether all ranks stop after this step, and why.

    Raises:
        FileAccessError: on all ranks, if a checkpoint could not be written.
    """
    with run.clock.phase(COMMUNICATION):
        stop = vote.is_agreed(has_fault=saver is not None and saver.has_failed)
    if stop is Stop.FAULT:
        assert saver is not None, "the only one that has faults"
        saver.finish()
        raise FileAccessError(f"{saver.root}: a rank could not write its part of a checkpoint; it says why")
    every = run.config.guard.exit_every
    return Stop.OUT_OF_TIME if stop is Stop.NO and every and step % every == 0 else stop


def leave(run: Run, log: MetricsLog, saver: Saver | None, stop: Stop, vote: StopVote, step: int) -> int:
    """End a run that was asked to stop, once its checkpoint is published."""
    if saver:
        saver.finish()
        tell_saved(run.mesh, log, saver)
    reason = "its time limit"
    if stop is Stop.SIGNAL:
        reason = vote.signal.name if vote.signal else "a signal to another rank"
    say(run.mesh, f" stopped by {reason} after iteration {step}; {describe_restart(run.config)}")
    return STOPPED if stop is Stop.SIGNAL else OUT_OF_TIME


def tell_saved(mesh: Mesh, log: MetricsLog, saver: Saver | None) -> None:
    """Say which checkpoints were published since the last call."""
    for saved in saver.take_saved() if saver else []:
        log.write_event({"iteration": saved.step, "event": "checkpoint", "write_s": saved.write_s})
        say(mesh, f" saved iteration {saved.step} in {saved.path}")


def tell_next(run: Run) -> None:
    """Say what can be done with a run that is finished."""
    folder = shlex.quote(str(run.folder))
    draws = f"python tools/report.py {folder} draws it as a page"
    looks = f"python tools/diagnose.py {folder} looks for what slowed or spoiled it"
    say(run.mesh, f" finished: {draws}, {looks}")


@contextmanager
def open_saver(run: Run) -> Iterator[Saver | None]:
    """What saves the run, on a group of its own; None if it is not to be saved."""
    own = run.config.checkpoint
    if own.save is None:
        yield None
        return
    keeping = Keeping(last=own.keep_last, every=own.keep_every)
    with own_group(run.mesh.world_group) as group:
        saver = Saver(Path(own.save), group, keeping=keeping, is_async=own.is_async, on_progress=run.clock.beat)
        with saver:
            yield saver


def is_due(step: int, every: int | None, last: int) -> bool:
    """Whether something done every `every` steps and after the last one is done now; 0 means never."""
    return every != 0 and (step == last or (every is not None and step % every == 0))


def describe_restart(config: TrainConfig) -> str:
    """What starting the run again will do."""
    if config.checkpoint.save is None:
        return "nothing was saved: give --save to be able to go on"
    return f"the same command goes on from the last checkpoint in {config.checkpoint.save}"
