"""A trace under `DistributedDataParallel`: the rank that overflowed names the place, the other says it did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers import Workers

from ampatch import amp


class Exponential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.log(self.first(x) * x))


def traced(opt_level: str) -> tuple[int, dict[str, Any]]:
    torch.manual_seed(0)
    model = Exponential()
    events: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"half_dtype": torch.float16, "verbosity": 0, "on_overflow": ("trace", events.append)}
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, init_scale=1.0, **options)
    with torch.no_grad():
        model.first.weight.fill_(1.0)
        model.first.bias.fill_(1.0)
    replica = DistributedDataParallel(model)
    x = torch.ones(2, 4) * (1 - dist.get_rank())  # log(0) on rank 1
    with amp.scale_loss(replica(x).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    amp.deinitialize()
    (event,) = events
    return len(event.gradients), event.to_dict()["trace"]


@pytest.mark.slow
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.filterwarnings("ignore:the loss of a skipped step:ampatch.errors.AmpWarning")
def test_the_trace_of_each_rank_says_where_it_overflowed(two: Workers, opt_level: str) -> None:
    (of_0, finite), (of_1, overflowed) = two.run(traced, opt_level)
    assert of_0 == of_1 > 0  # the all-reduce has spread the inf
    assert finite["direction"] == "unknown"
    assert "another rank's" in finite["notes"][0]
    assert overflowed["direction"] == "forward"
    assert overflowed["function"] == "torch.log"
