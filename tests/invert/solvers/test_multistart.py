"""The search from many starts, interrupted at the worst moment, gives a complete result."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from keyhole.core import Status, dump
from keyhole.invert import LevenbergMarquardt, plant


class Stopping(torch.Tensor):
    """A loss that raises KeyboardInterrupt when it is first read."""

    looked = False

    def cpu(self):
        if not Stopping.looked:
            Stopping.looked = True
            raise KeyboardInterrupt
        return self.as_subclass(torch.Tensor)


class Stopped(LevenbergMarquardt):
    """Raises Ctrl-C right after the third step, before its losses are recorded."""

    steps_taken = 0

    def step(self, equations, state):
        state = super().step(equations, state)
        Stopped.steps_taken += 1
        third = Stopped.steps_taken == 3
        return replace(state, loss=state.loss.as_subclass(Stopping)) if third else state


def test_ctrl_c_between_a_step_and_its_losses_keeps_the_history_complete(monkeypatch):
    monkeypatch.setattr(Stopping, "looked", False)
    monkeypatch.setattr(Stopped, "steps_taken", 0)
    problem, _ = plant(12, 12, scale=2.0, seed=1)
    result = Stopped(starts=4)(problem)
    assert result.status is Status.INTERRUPTED
    assert [step for step, _ in result.trace] == [0, 1, 2]
    assert all(math.isfinite(residual) for _, residual in result.trace)
    dump(result.to_dict())
