"""From a command line to a checked configuration: every fault is found before any is reported."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaflow.errors import ConfigError
from megaflow_trainer.config import fields
from megaflow_trainer.config.checks import find_faults
from megaflow_trainer.config.flags import FLAGS, LEGACY, MEGATRON_WORDS, NOT_BUILT, find_spelling
from megaflow_trainer.config.presets import PRESETS
from megaflow_trainer.config.recipe import read_recipe
from megaflow_trainer.config.resolve import resolve
from megaflow_trainer.config.sections import TrainConfig

_LIST_FIELDS = (
    *("data.path", "data.train_path", "data.valid_path", "data.test_path"),
    *("optim.no_decay", "step.ramp_up", "recompute.modules", "log.profile_ranks"),
)
_SHORT_FLAG = re.compile(r"-(?!inf|nan)[a-z]", re.IGNORECASE)
"""A flag with one dash: there are none, so it is named as unknown instead of being read as a value."""
_FIELD_NAME = re.compile(r"\b[a-z]+(?:\.|_)[a-z_0-9]+\b")


@dataclass(slots=True)
class Parsed:
    """What a command line says, before it is checked."""

    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    asked: dict[str, list[str]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def set(self, name: str, value: Any, spelled: str) -> None:
        """Set a field from a flag; the same flag again overrides, another flag must agree."""
        before = self.spelled.get(name, spelled)
        if before.split()[0] != spelled.split()[0] and self.values[name] != value:
            self.faults.append(f"{before} and {spelled} contradict each other: they are one setting, give one of them")
        self.values[name] = value
        self.spelled[name] = spelled


def read_command(argv: Sequence[str], *, world_size: int) -> tuple[TrainConfig, list[str]]:
    """Turn flags (and the recipe that `--config` names) into a complete configuration.

    Args:
        argv: the command line without the program's name.
        world_size: ranks of the run, from which the data-parallel size follows.

    Returns:
        The configuration with every derived field filled in, and lines to be said once.

    Raises:
        ConfigError: one error that lists every fault, a line each.
    """
    parsed, config, faults = _read_words(argv)
    broken = parsed.broken | {fault.split()[0] for fault in faults}
    faults += [
        fault for fault in find_faults(config, world_size=world_size) if not broken & set(_FIELD_NAME.findall(fault))
    ]
    if faults:
        raise ConfigError(_list_faults([_with_flag(fault) for fault in faults]))
    config, notes = resolve(config, world_size=world_size)
    return config, parsed.notes + [_with_flag(note) for note in notes]


def _read_words(argv: Sequence[str]) -> tuple[Parsed, TrainConfig, list[str]]:
    parsed = parse_flags(argv)
    config, faults = fields.build(parsed.values)
    return parsed, config, parsed.faults + list(_refuse(parsed)) + list(_contradict(parsed)) + faults


def check_words(argv: Sequence[str]) -> None:
    """Refuse a command line that is wrong for any number of ranks: each setting by itself, not how they fit together.

    Raises:
        ConfigError: one error that lists every fault, a line each.
    """
    _, _, faults = _read_words(argv)
    if faults:
        raise ConfigError(_list_faults([_with_flag(fault) for fault in faults]))


def parse_flags(argv: Sequence[str]) -> Parsed:
    """Read flags into values by field name, without checking what depends on several of them."""
    parsed = Parsed()
    known = fields.list_fields()
    pairs = list(_split(argv))
    for name, words in pairs:
        if name == "--config" and len(words) == 1:
            read_recipe(words[0], known, parsed.values, parsed.faults)
    if "--preset" in (name for name, _ in pairs) or parsed.values.get("model.preset") is not None:
        _apply_preset(pairs, parsed)
    for name, words in pairs:
        if name != "--config":
            _read_flag(name, words, known, parsed)
        elif len(words) != 1:
            parsed.faults.append("--config takes the path of one recipe")
    return parsed


def _apply_preset(pairs: Sequence[tuple[str, list[str]]], parsed: Parsed) -> None:
    """Put the fields of the named preset below those that the recipe sets; flags come after both."""
    asked = [words[0] for name, words in pairs if name == "--preset" and len(words) == 1]
    name = asked[-1] if asked else str(parsed.values.get("model.preset"))
    if name in PRESETS:
        own = {f"model.{field}": value for field, value in PRESETS[name].items()}
        parsed.values = {**own, **parsed.values}
        return
    near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.3)
    parsed.faults.append(
        f"model.preset {name!r} is not known"
        + (f"; the nearest known one is {near[0]}" if near else "")
        + f"; the known ones are {', '.join(PRESETS)}"
    )


def _split(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Cut a command line into flags and the words after each; words before any flag come under the name ''."""
    name, words = "", list[str]()
    for word in argv:
        if word.startswith("--") or _SHORT_FLAG.match(word):
            if name or words:
                yield name, words
            name, equals, value = word.partition("=")
            words = [value] if equals else []
        else:
            words.append(word)
    if name or words:
        yield name, words


def _read_flag(name: str, words: list[str], known: dict[str, fields.Field], parsed: Parsed) -> None:
    """Put one flag where it belongs: a field, a note, a request for what is not built, or a fault."""
    for flag in FLAGS:
        if flag.name == name:
            _read_value(name, words, flag.constant, known[flag.field], parsed)
            return
    for legacy in LEGACY:
        if legacy.name == name:
            parsed.faults += _count_fault(name, words, int(legacy.takes_value))
            if legacy.why:
                parsed.notes.append(f"{name} has no effect: {legacy.why}")
            return
    if not _read_not_built(name, words, parsed):
        parsed.faults.append(_unknown(name, words))


def _read_value(name: str, words: list[str], constant: Any, target: fields.Field, parsed: Parsed) -> None:
    if constant is not None:
        parsed.faults += _count_fault(name, words, 0)
        parsed.set(target.name, constant, name)
    elif not words or (len(words) > 1 and target.name not in _LIST_FIELDS):
        parsed.faults += _count_fault(name, words, 1)
        parsed.broken.add(target.name)
    else:
        try:
            value = fields.convert(target, words if target.name in _LIST_FIELDS else words[0], name)
            own = MEGATRON_WORDS.get(target.name, {}).get(str(value), value)
            if own != value:
                parsed.notes.append(f"{name} {value} is {own} here")
                value = own
            parsed.set(target.name, value, " ".join([name, *words]))
        except ConfigError as error:
            parsed.faults.append(str(error))
            parsed.broken.add(target.name)


def _read_not_built(name: str, words: list[str], parsed: Parsed) -> bool:
    """Note a flag of a feature that is not built, unless its value means that the feature is off."""
    for feature in NOT_BUILT:
        if name in feature.switches:
            parsed.asked.setdefault(feature.feature, []).append(name)
            return True
        for valued, accepted in feature.valued:
            if valued == name:
                if " ".join(words) not in accepted:
                    parsed.asked.setdefault(feature.feature, []).append(" ".join([name, *words]))
                return True
    return False


def _refuse(parsed: Parsed) -> Iterator[str]:
    for feature in NOT_BUILT:
        if feature.feature in parsed.asked:
            yield f"{', '.join(parsed.asked[feature.feature])}: this version does not have {feature.feature}; " + (
                feature.remedy
            )


def _contradict(parsed: Parsed) -> Iterator[str]:
    """Faults of dtypes that were given beside `--all-bf16`, which sets them; it overrides those of a recipe."""
    if not parsed.values.get("step.is_all_bf16"):
        return
    whole = parsed.spelled.get("step.is_all_bf16")
    for name in ("optim.main_dtype", "optim.main_grad_dtype", "optim.exp_avg_dtype", "optim.exp_avg_sq_dtype"):
        value, spelled = parsed.values.get(name, "bf16"), parsed.spelled.get(name)
        if value != "bf16" and (spelled is not None or whole is None):
            pair = f"{whole or 'step.is_all_bf16'} and {spelled or f'{name} {value}'}"
            yield f"{pair} contradict each other: the first asks for bf16, give one of them"


def _count_fault(name: str, words: list[str], wanted: int) -> list[str]:
    if len(words) == wanted:
        return []
    takes = "no value" if wanted == 0 else "one value"
    return [f"{name} takes {takes}, got {' '.join(words) or 'none'}"]


def _unknown(name: str, words: list[str]) -> str:
    if not name:
        return f"{' '.join(words)!r} is not a flag: every setting is given as --name value"
    bare = name.lstrip("-").replace("_", "-")  # the dashes before a name make all of them alike
    known = {flag.lstrip("-"): flag for flag in list_flag_names()}
    near = difflib.get_close_matches(bare, known, n=1, cutoff=0.5)
    return f"{name} is not a flag of this trainer" + (f"; the nearest known one is {known[near[0]]}" if near else "")


def list_flag_names() -> list[str]:
    """Every flag that is recognised, in whatever way."""
    names = [flag.name for flag in FLAGS] + [flag.name for flag in LEGACY] + ["--config", "--help", "--version"]
    for feature in NOT_BUILT:
        names += [*feature.switches, *(name for name, _ in feature.valued)]
    return names


def _with_flag(fault: str) -> str:
    """Name the flag beside each field that a message speaks of: `optim.lr` -> `optim.lr (--lr)`."""
    spelled = _list_spellings()

    def add(match: re.Match[str]) -> str:
        flag = spelled.get(match[0], match[0])
        return f"{match[0]} ({flag})" if flag != match[0] else match[0]

    return _FIELD_NAME.sub(add, fault)


@functools.cache
def _list_spellings() -> dict[str, str]:
    return {name: find_spelling(name) for name in fields.list_fields()}


def _list_faults(faults: list[str]) -> str:
    if len(faults) == 1:
        return faults[0]
    return "\n".join([f"{len(faults)} faults in the configuration:", *(f"  - {fault}" for fault in faults)])
