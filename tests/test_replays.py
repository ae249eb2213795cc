"""Predictions that are replayed are those that are computed, and follow the model they are made with."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from learner_helpers import Settings, build, quiet, train
from probprompt.engine.model import PromptedModel
from probprompt.kernels.cuda_graphs import SWITCH, WARM_UP, Captured, Replays

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Twice(nn.Module):
    """Doubles, and counts how often it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([2.0]))
        self.calls = 0

    def forward(self, batch: Tensor) -> Tensor:
        self.calls += 1
        return batch * self.factor


@torch.no_grad()
def test_on_a_cpu_it_is_called_as_it_is() -> None:
    module = Twice()
    replays = Replays(module.forward, module)
    for _ in range(3 * WARM_UP):
        assert replays(torch.ones(3, 2)).tolist() == [[2.0, 2.0]] * 3
    assert module.calls == 3 * WARM_UP and replays(torch.ones(0, 2)).shape == (0, 2)


@torch.no_grad()
def test_what_was_captured_goes_with_the_tensors_it_was_captured_with() -> None:
    norm, inner = nn.BatchNorm1d(2), nn.Linear(2, 2)
    within = nn.Sequential(inner)
    module = nn.Sequential(Twice(), norm, within)
    replays = Replays(module.forward, module)

    def kept() -> bool:
        replays._captured[1,] = Captured(replays._one, False)
        replays._check()
        return bool(replays._captured)

    assert not kept() and kept()
    for tensor in module.state_dict().values():
        tensor.zero_()
    assert kept()
    inner.bias = nn.Parameter(torch.ones(2))
    assert not kept() and kept()
    norm.running_mean = torch.ones(2)
    assert not kept() and kept()
    within.append(nn.Linear(2, 2))
    assert not kept() and kept()
    module.to(torch.bfloat16)
    assert not kept() and kept()


@on_a_gpu
@torch.no_grad()
def test_batches_of_a_size_are_replayed_and_follow_the_tensors() -> None:
    module = Twice().cuda()
    replays = Replays(module.forward, module)
    for number in range(4 * WARM_UP):  # three and four images are one size
        batch = torch.full((3 + number % 2, 2), float(number), device="cuda")
        assert torch.equal(replays(batch), 2 * batch)
    assert module.calls == WARM_UP + 1
    module.factor.fill_(5)  # in place: the graph reads it
    assert replays(batch).tolist() == (5 * batch).tolist() and module.calls == WARM_UP + 1
    module.factor = nn.Parameter(torch.tensor([7.0], device="cuda"))  # elsewhere
    assert replays(batch).tolist() == (7 * batch).tolist() and module.calls == WARM_UP + 2
    for size, calls in ((2 * replays.filled, WARM_UP + 1), (replays.filled + 1, 9), (2 * replays.most, 9)):
        module.calls = 0
        for _ in range(9):
            replays(torch.ones(size, 2, device="cuda"))
        assert module.calls == calls  # a power of two is captured, and filling up a large batch would not pay


@on_a_gpu
@torch.no_grad()
def test_what_was_given_stays_when_the_next_is_asked_for() -> None:
    module = Twice().cuda()
    replays = Replays(module.forward, module)
    answers = [replays(torch.full((2, 1), float(number), device="cuda")) for number in range(3 * WARM_UP)]
    assert [float(answer[0]) for answer in answers] == [2.0 * number for number in range(3 * WARM_UP)]


@on_a_gpu
def test_inference_mode_is_called_plainly_and_leaves_the_rest_alone() -> None:
    module = Twice().cuda()
    replays, batch = Replays(module.forward, module), torch.ones(2, 1, device="cuda")
    for _ in range(2 * WARM_UP):
        with torch.inference_mode():
            assert replays(batch).tolist() == [[2.0], [2.0]]
    assert module.calls == 2 * WARM_UP
    with torch.no_grad():
        assert all(replays(batch).tolist() == [[2.0], [2.0]] for _ in range(2 * WARM_UP))
    assert module.calls == 3 * WARM_UP + 1


@on_a_gpu
def test_threads_get_their_own_answers() -> None:
    module = Twice().cuda()
    replays, wrong = Replays(module.forward, module), list[int]()

    def ask(start: int) -> None:
        with torch.no_grad():
            for number in range(start, start + 200):
                answer = replays(torch.full((1 + number % 4, 3), float(number), device="cuda"))
                if not bool((answer == 2 * number).all()):
                    wrong.append(number)

    threads = [threading.Thread(target=ask, args=(1000 * place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def predictions(model: PromptedModel, images: Tensor) -> list[Tensor]:
    return [model.look(images[:count]).detach() for count in (1, 5, 128) * 6]  # 5 are filled up, 128 are not


@on_a_gpu
@pytest.mark.parametrize(
    "method", ("probprompt", "vq-prompt", "coda-prompt", "dual-prompt", "l2p", "hide-prompt", "evo-prompt", "apt", "ft")
)
@torch.no_grad()
def test_every_method_predicts_by_replays_what_it_predicts(
    settings: Settings, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop = build({**settings(training={"epochs": 1, "batch_size": 8}), "method": {"name": method}}, "cuda")
    learner = workshop.learner
    for task in workshop.tasks[:2]:
        with torch.enable_grad():
            train(learner, task)
        images = learner.viewer.evaluation(learner.images.store, task.rows[:5]).repeat(26, 1, 1, 1)
        replayed = predictions(learner.model, images)  # the model goes on learning between tasks
        monkeypatch.setenv(SWITCH, "off")
        plain = predictions(copy.deepcopy(learner.model), images)
        monkeypatch.delenv(SWITCH)
        for one, other in zip(replayed, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        with torch.enable_grad():
            learner.finish(task, quiet)


def test_a_copy_of_a_model_has_replays_of_its_own(settings: Settings) -> None:
    model = build(settings()).learner.model
    model._replays = Replays(model._look, model)
    assert copy.deepcopy(model)._replays is None
