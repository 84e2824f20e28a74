"""The shift between tokens and the hidden states that predict them."""

import pytest
import torch

from aligner.models.critic import _before_each_token, _read_values, last_token
from aligner.models.micro_batches import MicroBatch
from aligner.models.policy import chosen_positions, not_finite, predicting_positions
from aligner.ops.value_scale import ValueScale


def _micro(mask, lengths=(4, 4)):
    mask = torch.tensor(mask, dtype=torch.bool)
    tokens = torch.zeros(mask.shape, dtype=torch.int64)
    return MicroBatch(torch.arange(len(mask)), tokens, torch.tensor(lengths), {"mask": mask})


def test_a_token_is_predicted_by_the_state_before_it_in_row_order():
    micro = _micro([[0, 0, 1, 1], [0, 1, 0, 0]])
    assert predicting_positions(micro).tolist() == [1, 2, 4]
    assert chosen_positions(micro).nonzero().tolist() == [[0, 2], [0, 3], [1, 1]]


def test_without_a_chosen_token_one_stands_in_that_the_mask_leaves_out():
    micro = _micro([[0, 0, 0, 0], [0, 0, 0, 0]])
    assert predicting_positions(micro).tolist() == [0]
    assert not micro.fields["mask"].any()


def test_a_first_token_cannot_be_chosen():
    with pytest.raises(ValueError, match="column 0"):
        predicting_positions(_micro([[0, 0, 0, 1], [1, 0, 0, 0]]))


def test_values_are_read_one_state_earlier_and_the_bootstrap_at_the_last_token():
    output = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])[:, :, None]
    micro = _micro([[0, 1, 1, 1], [0, 1, 0, 0]], lengths=(4, 2))
    values, bootstrap = _read_values(ValueScale(rate=0.1), micro, output)
    assert values.tolist() == [[0.0, 1.0, 2.0, 3.0], [0.0, 5.0, 0.0, 0.0]]
    assert bootstrap.tolist() == [4.0, 6.0] == last_token(micro, output)[:, 0].tolist()
    assert _before_each_token(output)[1].tolist() == [0.0, 5.0, 6.0, 7.0]
    # of a head that says (V - 10) / 2: nothing is added where there is no token, nor before the first
    values, bootstrap = _read_values(ValueScale(rate=0.1, scale=2.0, offset=10.0), micro, output)
    assert values.tolist() == [[0.0, 12.0, 14.0, 16.0], [0.0, 20.0, 0.0, 0.0]] and bootstrap.tolist() == [18.0, 22.0]


def test_a_loss_that_is_not_finite_still_has_a_backward_pass():
    output = torch.ones(3, requires_grad=True)
    loss, metrics = not_finite(output * 2, ("ratio",))
    loss.backward()
    assert torch.isnan(output.grad).all() and torch.isnan(metrics["ratio"])
