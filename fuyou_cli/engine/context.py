"""What the parts of the engine share for as long as a run lasts."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.model import ModelSpec
from ..spec.plan import Plan
from ..swap.daemon import SwapDaemon
from .anatomy import Anatomy
from .devices.base import Device
from .host_memory import HostMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """`anatomy` and `model` are the same model, as modules and as numbers. `plan` says where its bytes rest. `daemon`
    moves them between the arena (`memory`) and the store, and updates them. `device` computes."""

    anatomy: Anatomy
    model: ModelSpec
    plan: Plan
    daemon: SwapDaemon
    memory: HostMemory
    device: Device
