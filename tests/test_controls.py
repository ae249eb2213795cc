"""The controls: no prompts, nothing to train, and the head that each is known for."""

import pytest
import torch

from probprompt.heads import HEADS, HeadConfig, make_head
from probprompt.methods import EVALUATION, Context, Shape, find, parse_config

HEADS_OF = {"linear-probe": "linear", "nearest-mean": "nearest-mean", "lda": "lda", "ranpac": "ridge"}


@pytest.mark.parametrize(("name", "head"), HEADS_OF.items())
def test_a_control_is_a_head_on_features_that_never_change(name: str, head: str) -> None:
    method = find(name)
    assert method.preferred_head == head
    assert not (method.needs_query or method.needs_summary or method.trains_backbone or method.joint)
    assert type(make_head(HeadConfig(projections=5), method.preferred_head, 4, 0)) is HEADS[head]
    built = method.create(parse_config(name), Shape(width=4, depth=2), seed=0)
    for context in (EVALUATION, Context(training=True, task=0, labels=torch.tensor([0]))):
        built.begin_task(0, 2)
        answer = built.prompts(None, context)
        assert answer.prompts == {} and answer.loss is None
        built.end_task(None)
    assert not built.state_dict() and not any(parameters for parameters, _ in built.groups())


@pytest.mark.parametrize("name", HEADS_OF)
def test_a_control_has_a_name_and_no_settings(name: str) -> None:
    assert parse_config(name).model_dump() == {"name": name}
    assert "control" in find(name).summary
