"""The arms of a study: named policies, resolved for the device that is studied; and which of them to recommend.

An arm's policy is settled before anything runs (``auto`` becomes a format, the device's overrides are applied), so
that a study for another device computes here, by emulation, with the formats it would use there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from castwise.errors import FormatError, StudyError
from castwise.formats import BF16, FP32, NumberFormat, parse_format
from castwise.hardware import Device
from castwise.policy import Policy
from castwise.study.verdict import REFERENCE, Status
from castwise.study.words import listed

__all__ = ["DEFAULT_PRECISIONS", "Arm", "arms_of", "cheapest", "why_recommended"]

DEFAULT_PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy under study.

    Attributes:
        name: short, unique in the study; keys of ``results.json``.
        policy: resolved for the device.
        remedy: what a remedy changed, in words; empty for the arms that were asked for.
    """

    name: str
    policy: Policy
    remedy: str = ""

    @property
    def format(self) -> NumberFormat:
        return self.policy.low_format

    @property
    def exceptions(self) -> int:
        """How many rules of its own the policy has: of two policies in one format, the plainer is the cheaper."""
        return len(self.policy.layers) + len(self.policy.ops)


def arms_of(precisions: Iterable[str], device: Device) -> tuple[Arm, ...]:
    """The arms that ``precisions`` name, fp32 first whether it is named or not.

    Each is a format in any spelling, a preset (``O1``, ``auto``) or the path of a policy file.

    Raises:
        StudyError: two arms would have one name.
        PolicyError: no such format, preset or file, or the policy itself is wrong.
    """
    arms: dict[str, Arm] = {REFERENCE: Arm(REFERENCE, Policy.coerce("float32"))}
    for spelled in (word.strip() for word in precisions):
        if not spelled:
            continue
        policy = Policy.coerce(spelled).resolve(device)
        name = _arm_name(spelled)
        if name == REFERENCE and policy == arms[REFERENCE].policy:
            continue
        if name in arms:
            raise StudyError(
                f"Two arms would be called {name!r} (from {spelled!r}). Name each precision once; rename the policy "
                f"file."
            )
        arms[name] = Arm(name, policy)
    if len(arms) == 1:
        raise StudyError(
            "There is nothing to compare fp32 with. Name at least one more precision, such as --precisions fp16,bf16."
        )
    return tuple(arms.values())


def _arm_name(spelled: str) -> str:
    if spelled.casefold().endswith(".toml"):
        return Path(spelled).stem
    try:
        return parse_format(spelled).name
    except FormatError:
        return spelled


def cheapest(arms: Sequence[Arm], status: Mapping[str, Status], device: Device) -> Arm:
    """The cheapest arm that is safe: the fastest format that the device computes natively, else fp32.

    A format that the device only emulates costs time instead of saving it and is never chosen, however safe.
    Where the device computes two formats equally fast, the one with fewer layers and ops kept in fp32 comes first, then
    bf16 before fp16 as it needs no loss scaling.
    """
    reference = next(arm for arm in arms if arm.name == REFERENCE)
    eligible = [
        arm
        for arm in arms
        if arm.name != REFERENCE and status.get(arm.name) is Status.SAFE and _gains(device, arm.format)
    ]
    return min(eligible, key=lambda arm: _cost(arm, device), default=reference)


def why_recommended(chosen: Arm, arms: Sequence[Arm], status: Mapping[str, Status], device: Device) -> str:
    """One sentence that says why ``chosen`` is the cheapest safe policy."""
    safe = [arm for arm in arms if arm.name != REFERENCE and status.get(arm.name) is Status.SAFE]
    names = listed([arm.name for arm in safe])
    if chosen.name != REFERENCE:
        scaling = " with loss scaling" if chosen.policy.uses_scaling else ""
        among = f" among the safe ones ({names})" if len(safe) > 1 else ""
        return f"{chosen.name}{scaling}: safe, native on {device.name}, and the cheapest{among}"
    if not safe:
        return "fp32: no other arm was found safe"
    if not any(device.native(arm.format) for arm in safe):
        formats = " or ".join(sorted({arm.format.name for arm in safe}))
        lacking = f"{device.name} has no arithmetic of its own for {formats}: no time would be saved"
        return f"fp32 on this device. {names} would be safe too, but {lacking}"
    return f"fp32. {names} would be safe too, but no time would be saved on {device.name}"


def _gains(device: Device, fmt: NumberFormat) -> bool:
    return fmt.bits < FP32.bits and device.gains(fmt)


def _cost(arm: Arm, device: Device) -> tuple[float, int, bool, str]:
    """Smaller is cheaper: seconds per FLOP where known (else by width), then fewer exceptions, then bf16 first."""
    peak = device.peak.get(arm.format.name)
    time = 1.0 / peak if peak else arm.format.bits * 1.0
    return time, arm.exceptions, arm.format is not BF16, arm.name
