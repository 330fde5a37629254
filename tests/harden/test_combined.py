"""Combined defences: the sum of the losses of each."""

from __future__ import annotations

import pytest
import torch

import tiny_classifiers as small
from keyhole.core.errors import InputError
from keyhole.harden import AttackMasks, Combined, FreeLB, Plain


def gradients(defence, stream):
    model = small.model(seed=1).train()
    batch, labels = small.batch()
    for loss in defence.losses(model, batch, labels, stream):
        loss.backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def test_losses_are_summed_and_drawn_in_order():
    methods = (FreeLB(), AttackMasks(share=0.1, weight=2.0))
    both = gradients(Combined(methods), torch.Generator().manual_seed(3))
    stream = torch.Generator().manual_seed(3)
    alone = sum(gradients(method, stream) for method in methods)
    assert (both - alone).abs().max() < 1e-6 * alone.abs().max()


def test_one_method_alone_is_unchanged_and_none_is_refused():
    both = gradients(Combined((Plain(),)), torch.Generator().manual_seed(3))
    assert torch.equal(both, gradients(Plain(), torch.Generator().manual_seed(3)))
    with pytest.raises(InputError, match="at least one method"):
        Combined(())


def test_strongest_combines_freelb_and_attack_masks():
    method = Combined.strongest(weight=0.5)
    assert method.methods == (FreeLB(), AttackMasks(share=0.01, weight=0.5))
