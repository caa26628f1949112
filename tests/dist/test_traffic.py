"""What a step is said to send, against what it does send and against the formulas of the modules, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.layouts import GLOBAL_BATCH, SEQ_LEN, Case, ListLoader, find_mesh, make_config
from helpers.ranks import RankPool
from megaflow_trainer.config.layout import make_layout
from megaflow_trainer.optim.schedule import StepPlan
from megaflow_trainer.parallel.mesh import Mesh
from megaflow_trainer.parallel.traffic import Traffic, read_flows
from megaflow_trainer.training.build import build_model, build_optimizer
from megaflow_trainer.training.clock import Clock
from megaflow_trainer.training.feed import Feed
from megaflow_trainer.training.step import train_step

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

LAYERS, HIDDEN, ITEM, VOCAB = 4, 32, 4, 128
TP2, PP2, CP2 = (f"--{axis}-parallel-size 2" for axis in ("tensor-model", "pipeline-model", "context"))
EP2 = "--expert-model-parallel-size 2"
SMALL = "--ddp-bucket-size 4000"


class Watch:
    """Adds up what torch's collectives are given, by the ring's formulas, as long as it is entered."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = {}
        self.kept: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Watch:
        self._replace("all_reduce", lambda x, *_, **o: self._add("all_reduce", 2, x, o["group"]))
        self._replace("all_gather_into_tensor", lambda *a, **o: self._add("all_gather", 1, _first(a, o), o["group"]))
        self._replace(
            "reduce_scatter_tensor", lambda *a, **o: self._add("reduce_scatter", 1, _second(a, o), o["group"])
        )
        self._replace("all_to_all_single", self._exchange)
        self._replace("batch_isend_irecv", lambda ops: [self._send(op) for op in ops])
        return self

    def __exit__(self, *_: object) -> None:
        for name, keep in self.kept.items():
            setattr(dist, name, keep)

    def _replace(self, name: str, count: Callable[..., Any]) -> None:
        keep = self.kept[name] = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            count(*args, **options)
            return keep(*args, **options)

        setattr(dist, name, call)

    def _add(self, kind: str, times: int, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        size = dist.get_world_size(group)
        self.sent[kind] = self.sent.get(kind, 0) + times * (size - 1) / size * tensor.numel() * tensor.element_size()

    def _exchange(self, arrived: torch.Tensor, given: torch.Tensor, *splits: Any, **options: Any) -> None:
        if not splits:
            self._add("all_to_all", 1, arrived, options["group"])
            return
        parts = given.split(splits[1])  # rows to each rank; those to this one stay
        away = given.nbytes - parts[dist.get_rank(options["group"])].nbytes
        self.sent["all_to_all"] = self.sent.get("all_to_all", 0) + away

    def _send(self, op: dist.P2POp) -> None:
        if op.op is dist.isend:
            self.sent["send"] = self.sent.get("send", 0) + op.tensor.numel() * op.tensor.element_size()


def _first(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    return args[0] if args else options["output_tensor"]


def _second(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    return args[1] if len(args) > 1 else options["input"]


def measure(pool_mesh: Mesh, case: Case) -> dict[str, Any] | None:
    """The third step: what is reported, what torch was given, and elements of the buckets of gradients."""
    config = make_config(case)
    layout = make_layout(config.parallel, world_size=case.num_ranks, num_kv_heads=config.model.kv_heads)
    mesh = find_mesh(pool_mesh, layout)
    if pool_mesh.rank >= case.num_ranks:
        return None
    model = build_model(config, mesh)
    optimizer, clock, loader = (
        build_optimizer(model, config),
        Clock(mesh.device),
        ListLoader(case.micro, mesh, case.vocab),
    )
    feed = Feed(loader, mesh.device, clock, vocab_size=case.vocab, eod_id=None)  # type: ignore[arg-type]
    count = config.step.sizes.num_micro_batches
    plan = StepPlan(lr=1e-3, weight_decay=0.0, num_micro_batches=count, num_samples=GLOBAL_BATCH)
    for _ in range(2):
        train_step(model, optimizer, feed, mesh, clock, config, plan=plan)
    with Watch() as watch:
        report = train_step(model, optimizer, feed, mesh, clock, config, plan=plan, has_norm=True)
    sizes = [bucket.size for bucket in getattr(model.gradients, "buckets", [])]
    return {"said": read_flows(report.flows), "sent": watch.sent, "elements": sum(sizes), "count": count}


def by_kind(said: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for kinds in said.values():
        for kind, values in kinds.items():
            total[kind] = total.get(kind, 0) + values["sent_bytes"]
    return {kind: sent for kind, sent in total.items() if sent}


ZERO1, ZERO2, ZERO3 = "--use-distributed-optimizer", "--zero-stage 2", "--zero-stage 3"
SP, HYBRID = "--sequence-parallel", "--num-distributed-optimizer-instances 2"
CASES = [
    *(Case("gpt2", f"{TP2} {more}", 2) for more in ("", SP, "--no-overlap", f"{SP} --no-overlap")),
    *(Case("gpt2", f"{zero} {SMALL} {more}", 2) for zero in ("", ZERO1, ZERO2) for more in ("", "--no-overlap")),
    Case("gpt2", ZERO3, 2),
    *(Case("gpt2", f"{PP2} {ZERO3} --pipeline-schedule {kind}", 4) for kind in ("1f1b", "gpipe")),
    Case(
        "further", f"{PP2} {ZERO3} --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2", 4, micro=1
    ),
    Case("gpt2_plain", f"{ZERO3} {HYBRID} {TP2}", 8, micro=1),
    Case("gpt2", f"{ZERO2} {HYBRID}", 4, micro=1),
    *(Case("gpt2", f"{PP2} --pipeline-schedule {kind}", 2) for kind in ("1f1b", "zbv")),
    *(Case("gpt2", f"{CP2} --cp-comm-type {kind}", 2) for kind in ("p2p", "all_gather", "a2a")),
    Case("multi_query", f"{TP2} {SP} {PP2} {ZERO1} {SMALL}", 8),
    Case("qwen", f"{TP2} {CP2} {ZERO1}", 8),
    *(Case("moe", f"{EP2} {more}", 2) for more in ("", ZERO1, "--moe-token-dispatcher-type allgather")),
    *(Case("moe", f"{TP2} {more}", 2) for more in ("", SP)),
    Case("moe_bias", f"{EP2} --moe-shared-expert-overlap", 2),
    Case("moe", f"{TP2} {EP2} --expert-tensor-parallel-size 1 {CP2} {ZERO1}", 4),
    Case("moe_padded", f"{EP2} {PP2}", 4),
    *(Case("moe", f"{ZERO3} {more}", 2) for more in ("", "--bf16", EP2, f"{EP2} --recompute-granularity full")),
    Case("moe_bias", f"{EP2} {ZERO3}", 4, micro=1),
    Case("moe_bias", f"{EP2} {ZERO3} {PP2} --bf16", 8, micro=1),
    Case("moe", f"{EP2} {ZERO3} {HYBRID}", 4),
    Case("moe", f"{EP2} {ZERO2} {HYBRID}", 8, micro=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind} {case.flags}")
def test_no_message_of_a_step_is_left_out_or_counted_twice(eight_ranks: RankPool, case: Case) -> None:
    for found in eight_ranks.run(measure, case)[: case.num_ranks]:
        assert by_kind(found["said"]) == pytest.approx(found["sent"], abs=8)


def sent(found: dict[str, Any], axis: str) -> dict[str, float]:
    return {kind: values["sent_bytes"] for kind, values in found["said"][axis].items()}


def test_bytes_of_tensor_parallelism_are_those_of_its_formula(eight_ranks: RankPool) -> None:
    """2 all-reduces of [b, s, h] a block and direction, those of embedding and loss, and 3 numbers a token."""
    stream = 2 * SEQ_LEN * HIDDEN * ITEM
    for found in eight_ranks.run(measure, Case("gpt2", TP2, 2))[:2]:
        per_batch = (2 * 2 * LAYERS + 2) * stream + 3 * 2 * SEQ_LEN * ITEM
        assert sent(found, "tp") == {"all_reduce": found["count"] * per_batch}  # 2 (n-1)/n is 1
        assert sent(found, "world") == {"all_reduce": 8 + 8}  # squares of both norms; losses are those of one rank
        assert found["said"]["tp"]["all_reduce"]["background_bytes"] == found["count"] * 2 * LAYERS * stream
        assert found["said"]["tp"]["all_reduce"]["waited_s"] > 0


@pytest.mark.parametrize("overlap", ["", "--no-overlap"])
def test_bytes_of_sequence_parallelism_are_those_of_its_formula(eight_ranks: RankPool, overlap: str) -> None:
    """Of [b, s, h] an all-gather into a pair and a reduce-scatter out of it, the same backward, and what has entered
    gathered once more beside a product; the same of embedding and loss, once.
    """
    half = 2 * SEQ_LEN * HIDDEN * ITEM / 2  # 2 ranks: (n-1)/n
    for found in eight_ranks.run(measure, Case("gpt2", f"{TP2} {SP} {overlap}", 2))[:2]:
        again = 0 if overlap else 2 * LAYERS
        gathered, scattered = 2 * 2 * LAYERS + 2, 2 * 2 * LAYERS + 2
        own = sent(found, "tp")
        assert own["all_gather"] == found["count"] * (gathered + again) * half
        assert own["reduce_scatter"] == found["count"] * scattered * half
        background = {kind: values["background_bytes"] for kind, values in found["said"]["tp"].items()}
        assert background["all_gather"] == background["reduce_scatter"] == found["count"] * again * half


@pytest.mark.parametrize("overlap", ["", "--no-overlap"])
@pytest.mark.parametrize("flags", ["", ZERO1, ZERO2], ids=["zero0", "zero1", "zero2"])
def test_bytes_of_data_parallelism_are_those_of_its_formula(eight_ranks: RankPool, flags: str, overlap: str) -> None:
    for found in eight_ranks.run(measure, Case("gpt2", f"{flags} {SMALL} {overlap}", 2))[:2]:
        half = found["elements"] * ITEM // 2
        expected = {
            "": {"all_reduce": 2 * half},
            ZERO1: {"reduce_scatter": half, "all_gather": half},
            ZERO2: {"reduce_scatter": half * found["count"], "all_gather": half},
        }
        assert sent(found, "dp") == expected[flags]
        assert sent(found, "world") == {"all_reduce": 16 + (8 if flags else 0)}  # losses and tokens; squares
        background = sum(values["background_bytes"] for values in found["said"]["dp"].values())
        assert background == (sum(expected[flags].values()) if not overlap else half if flags else 0)


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
def test_bytes_of_context_parallelism_are_those_of_its_formula(eight_ranks: RankPool, kind: str) -> None:
    own = 2 * SEQ_LEN // 2 * HIDDEN * ITEM  # keys of this rank
    expected = {
        "p2p": {"send": 8 * own},  # keys and values once forward, once backward, and their gradients twice
        "all_gather": {"all_gather": 2 * own, "reduce_scatter": 2 * own},
        "a2a": {"all_to_all": 2 * 4 * own / 2},
    }
    for found in eight_ranks.run(measure, Case("gpt2", f"{CP2} --cp-comm-type {kind}", 2))[:2]:
        assert sent(found, "cp") == {name: size * LAYERS * found["count"] for name, size in expected[kind].items()}


def test_bytes_of_a_pipeline_are_those_of_its_formula(eight_ranks: RankPool) -> None:
    """[b, s, h] a micro-batch and border forward, the same backward; a tied embedding's gradient at the end."""
    for found in eight_ranks.run(measure, Case("gpt2", PP2, 2))[:2]:
        stream = 2 * SEQ_LEN * HIDDEN * ITEM
        assert sent(found, "pp") == {"send": found["count"] * stream, "all_reduce": VOCAB * HIDDEN * ITEM}


@pytest.mark.parametrize("flags", ["", "--moe-token-dispatcher-type allgather"], ids=["alltoall", "allgather"])
def test_bytes_of_expert_parallelism_are_those_of_its_formula(eight_ranks: RankPool, flags: str) -> None:
    """k rows of h a token whose expert is elsewhere, four times; or all of the others' tokens, choices and weights."""
    own, k, experts = 2 * SEQ_LEN, 2, 4
    found = eight_ranks.run(measure, Case("moe_padded", f"{EP2} {flags}", 2))[:2]
    for one in found:
        times = LAYERS * one["count"]
        if flags:  # two ranks: half of what is gathered comes from the other one
            gathered = own * (HIDDEN * ITEM + k * ITEM)
            assert sent(one, "ep") == {
                "all_gather": times * (gathered + own * (k * 8 + k) + own * HIDDEN * ITEM),
                "reduce_scatter": times * (own * HIDDEN * ITEM + gathered),
            }
        else:  # filled up to twice the even share: each expert takes own * k / experts * 2 rows of a rank
            rows = experts // 2 * (own * k // experts * 2)
            assert sent(one, "ep") == {"all_to_all": times * 4 * rows * HIDDEN * ITEM}


def test_nothing_is_timed_between_log_lines_and_a_step_hands_over_what_it_counted() -> None:
    traffic = Traffic()
    traffic.start(is_timed=False)
    with traffic.wait("tp", "all_reduce"):
        traffic.count("tp", "all_reduce", 3.5)
    flows = traffic.take()
    traffic.count("tp", "all_reduce", 100)  # an evaluation
    assert read_flows(flows) == {
        "tp": {"all_reduce": {"calls": 1, "sent_bytes": 4, "background_bytes": 0, "waited_s": 0.0}}
    }
    traffic.start()
    assert traffic.take() == {}


class Event:
    """A GPU's event that was reached at the next of `times`, in ms."""

    times: list[float]
    log: list[str]

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: str) -> None:
        self.at = Event.times.pop(0)
        Event.log.append(stream)

    def synchronize(self) -> None:
        Event.log.append("waited")

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_on_a_gpu_events_of_the_computing_stream_are_read_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.times, Event.log = [10.0, 14.0, 20.0, 21.0], []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    traffic = Traffic(torch.device("cuda", 1))
    traffic.start()
    for _ in range(2):
        with traffic.wait("tp", "all_gather"):
            pass
    assert Event.log == ["stream of cuda:1"] * 4  # nothing was waited for
    (values,) = read_flows(traffic.take())["tp"].values()
    assert values["waited_s"] == pytest.approx(0.005)
