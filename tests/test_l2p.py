"""L2P, L2P++ and Deep L2P++ against their rules, written down a second time with loops in float64."""

from collections import Counter
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from method_helpers import build, cosine, injected, loss_of, normal, same, training
from probprompt.backbones.vit import FrozenViT
from probprompt.methods import EVALUATION, Context, parse_config
from probprompt.methods.l2p import L2P, DeepL2PPlus, L2PPlus, PooledPrompts
from probprompt.prompts import Prefix, Prompt, Tokens

WIDTH, DEPTH, BATCH = 7, 5, 6
NAMES = ("l2p", "l2p++", "deep-l2p++")
PREFIXES = NAMES[1:]
SMALL: dict[str, dict[str, Any]] = {
    "l2p": {"components": 6, "tokens": 3, "top_k": 3},
    "l2p++": {"components": 6, "tokens": 4, "top_k": 3, "blocks": (2,)},
    "deep-l2p++": {"components": 6, "tokens": 4, "top_k": 3, "blocks": (1, 3)},
}
TRAINING = training()


def fresh(name: str, width: int = WIDTH, **settings: Any) -> PooledPrompts:
    """A small method before training."""
    method = build(name, width, DEPTH, **{**SMALL[name], **settings})
    assert isinstance(method, PooledPrompts)
    return method


def moved(name: str, **settings: Any) -> PooledPrompts:
    """A small method with keys of all directions and of very different lengths."""
    method, source = fresh(name, **settings), torch.Generator().manual_seed(3)
    with torch.no_grad():
        method.keys.copy_(torch.randn(method.keys.shape, generator=source))
        method.keys.mul_(torch.logspace(-1, 1, method.keys.shape[1])[:, None])
    return method


def some_queries(count: int = BATCH, seed: int = 1, width: int = WIDTH) -> Tensor:
    return normal(count, width, seed=seed, scale=5)


# The rules once more


def choices(method: PooledPrompts, slot: int, query: Tensor) -> list[list[int]]:
    """The entries of every image, by falling cosine."""
    keys, top_k = method.keys[slot], method.config.top_k
    every = []
    for row in query:
        every.append(sorted(range(len(keys)), key=lambda n: (-cosine(row, keys[n]), n))[:top_k])
    if not method.config.batchwise:
        return every
    votes = Counter(n for chosen in every for n in chosen)
    return [sorted(votes, key=lambda n: (-votes[n], n))[:top_k]] * len(query)


def key_loss(method: PooledPrompts, query: Tensor) -> float:
    """The loss without its weight."""
    total = 0.0
    for slot in range(len(method.blocks)):
        chosen, keys = choices(method, slot, query), method.keys[slot]
        for image, row in enumerate(query):
            cosines = [cosine(row, keys[n]) for n in chosen[image]]
            if isinstance(method, L2P):
                total -= sum(cosines) / len(query)
            else:
                total += sum(1 - value for value in cosines)
    return total


@pytest.mark.parametrize("context", [EVALUATION, TRAINING], ids=["evaluation", "training"])
@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 6])
@pytest.mark.parametrize("name", NAMES)
def test_the_chosen_entries_follow_each_other(name: str, top_k: int, batchwise: bool, context: Context) -> None:
    """As tokens at the input, or every one with its keys and values."""
    method, query = moved(name, top_k=top_k, batchwise=batchwise), some_queries()
    prompts = method.prompts(query, context).prompts
    assert list(prompts) == list(SMALL[name].get("blocks", [0]))
    every = []
    for slot, prompt in enumerate(prompts.values()):
        for image, chosen in enumerate(choices(method, slot, query)):
            entries = [method.pool[slot, n] for n in sorted(chosen)]
            if name == "l2p":
                assert isinstance(prompt, Tokens) and prompt.positioned
                assert torch.equal(prompt.tokens[image], torch.cat(entries))
            else:
                assert isinstance(prompt, Prefix)
                assert torch.equal(prompt.key[image], torch.cat([entry[:2] for entry in entries]))
                assert torch.equal(prompt.value[image], torch.cat([entry[2:] for entry in entries]))
            every.append(tuple(chosen))
    if (name, top_k, batchwise) == ("deep-l2p++", 3, False):
        assert len(set(every)) > 6 and any(list(chosen) != sorted(chosen) for chosen in every)
        assert choices(method, 0, query) != choices(method, 1, query)


@pytest.mark.parametrize("name", NAMES)
def test_images_that_choose_the_same_entries_have_the_same_one_in_every_slot(name: str) -> None:
    method = fresh(name, width=3, components=4, top_k=2)
    with torch.no_grad():
        method.keys.copy_(torch.tensor([[-1, -1, -1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]).expand_as(method.keys))
    query = torch.tensor([[0.0, 2.0, 1.0], [0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    assert choices(method, 0, query) == [[2, 3], [3, 2], [1, 2]]
    for tokens in injected(method, query).values():
        assert torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[0], tokens[2])


def by_rank(method: PooledPrompts, query: Tensor) -> dict[int, Prompt]:
    """The same entries, nearest or most voted for first."""
    ranked: dict[int, Prompt] = {}
    for slot, block in enumerate(method.blocks):
        entries = method.pool[slot, choices(method, slot, query)].detach()  # (B, k, M, D)
        key, value = (part.flatten(1, 2) for part in entries.chunk(2, dim=2))
        ranked[block] = (
            Tokens(entries.flatten(1, 2), positioned=True) if method.readout == "tokens" else Prefix(key, value)
        )
    return ranked


@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_features_do_not_know_the_order_of_the_entries(name: str, batchwise: bool) -> None:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": DEPTH, "num_heads": 3}
    model = VisionTransformer(**arguments, num_classes=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    backbone, images = FrozenViT(model), torch.randn(BATCH, 3, 16, 16)
    method, query = moved(name, width=24, batchwise=batchwise), some_queries(width=24)
    ordered, ranked = method.prompts(query, EVALUATION).prompts, by_rank(method, query)
    found, expected = (backbone.features(images, prompts, method.readout) for prompts in (ordered, ranked))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert any(chosen != sorted(chosen) for s in range(len(method.blocks)) for chosen in choices(method, s, query))
    with torch.no_grad():
        method.pool.copy_(method.pool.roll(1, dims=1))  # other entries, and the features are others
    other = backbone.features(images, method.prompts(query, EVALUATION).prompts, method.readout)
    assert (other - expected).abs().max() > 0.01


@pytest.mark.parametrize("width", [1, 5, 16, 19])
def test_among_equal_keys_the_earlier_entry_comes_first(width: int) -> None:
    method = fresh("l2p", width=width, components=40, top_k=5)
    with torch.no_grad():
        method.keys.copy_(method.keys[0, 0].expand(40, -1))
        method.keys[0, 3] *= -1
    query = method.keys[0, :1].detach() + 0.1
    assert method.relevance(query)[0][0, 0].nonzero().flatten().tolist() == [0, 1, 2, 4, 5]
    assert torch.equal(injected(method, query)[0][0], method.pool[0, [0, 1, 2, 4, 5]].flatten(0, 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_length_of_a_query_does_not_matter(name: str) -> None:
    assert same(injected(moved(name), some_queries()), injected(moved(name), 100 * some_queries()))


@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_relevance_is_the_share_of_the_chosen(name: str, batchwise: bool) -> None:
    method, query = moved(name, batchwise=batchwise), some_queries()
    shown = method.relevance(query)
    assert list(shown) == list(method.blocks)
    for slot, block in enumerate(method.blocks):
        expected = torch.zeros(BATCH, 1, 6)
        for image, chosen in enumerate(choices(method, slot, query)):
            expected[image, 0, chosen] = 1 / 3
        torch.testing.assert_close(shown[block], expected)


def test_published_defaults_of_l2p() -> None:
    settings = [parse_config(name).model_dump() for name in NAMES]
    assert [(one["pull"], one["initial"]) for one in settings] == [(0.1, "symmetric"), *[(1.0, "uniform")] * 2]
    assert (L2P.readout, L2PPlus.readout, DeepL2PPlus.readout) == ("tokens", "class", "class")
    assert all(method.query_readout == "class" and method.needs_query for method in (L2P, L2PPlus, DeepL2PPlus))
    assert injected(fresh("l2p", tokens=1), some_queries())[0].shape == (BATCH, 3, WIDTH)  # an odd number is fine


def test_the_vote_goes_by_number_then_by_index() -> None:
    method = fresh("l2p", width=3, components=4, top_k=2, batchwise=True)
    with torch.no_grad():
        method.keys.copy_(torch.tensor([[[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, -1, -1]]]))
    query = torch.tensor([[0.0, 1.0, 2.0], [0.0, 2.0, 1.0], [1.0, 0.0, 2.0]])  # chosen: 2 1, 1 2, 2 0
    for tokens in injected(method, query)[0]:  # three votes for 2, two for 1, one for 0
        assert torch.equal(tokens, method.pool[0, [1, 2]].flatten(0, 1))
    for tokens in injected(method, query[1:])[0]:  # two votes for 2, one for 1 and one for 0
        assert torch.equal(tokens, method.pool[0, [0, 2]].flatten(0, 1))


@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("pull", [0.1, 1.0, 2.5])
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_pulls_the_chosen_keys(name: str, pull: float, batchwise: bool) -> None:
    method, query = moved(name, pull=pull, batchwise=batchwise), some_queries()
    loss = loss_of(method, query, TRAINING)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(pull * key_loss(method, query), rel=1e-5)
    assert method.prompts(query, EVALUATION).loss is None
    assert moved(name, pull=0).prompts(query, TRAINING).loss is None


@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("name", PREFIXES)
def test_the_published_loss_pairs_every_query_with_the_choice_of_every_image(name: str, batchwise: bool) -> None:
    method, query = moved(name, legacy_key_loss=True, batchwise=batchwise), some_queries()
    expected = 0.0
    for slot in range(len(method.blocks)):
        for row in query:
            for chosen in choices(method, slot, query):
                expected += sum(1 - cosine(row, method.keys[slot, n]) for n in chosen)
    assert loss_of(method, query, TRAINING).item() == pytest.approx(expected, rel=1e-5)
    correct = moved(name, batchwise=batchwise)
    assert expected > 4 * loss_of(correct, query, TRAINING).item()
    alone = [loss_of(one, query[:1], TRAINING).item() for one in (method, correct)]
    assert alone[0] == pytest.approx(alone[1])
    assert same(injected(correct, query, TRAINING), injected(method, query, TRAINING))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_moves_an_images_keys_towards_it_and_no_others(name: str) -> None:
    method, query = moved(name), some_queries(1)
    loss_of(method, query, TRAINING).backward()
    assert method.pool.grad is None and method.keys.grad is not None
    for slot in range(len(method.blocks)):
        chosen = choices(method, slot, query)[0]
        for n in range(6):
            gradient, key = method.keys.grad[slot, n], method.keys[slot, n].detach()
            if n not in chosen:
                assert (gradient == 0).all()
                continue
            # d cos(q, K) / dK = (q/|q| - cos K/|K|) / |K|
            toward = query[0] / query[0].norm() - cosine(query[0], key) * key / key.norm()
            weight = 0.1 if name == "l2p" else 1.0
            torch.testing.assert_close(gradient, -weight * toward / key.norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_train_the_chosen_entries_alone(name: str) -> None:
    method, query = moved(name), some_queries(2)
    factor = torch.ones(1, 1) if name == "l2p" else torch.tensor([1.0] * 6 + [2.0] * 6)[:, None]  # keys, then values
    torch.cat([(factor * tokens).flatten() for tokens in injected(method, query, TRAINING).values()]).sum().backward()
    assert method.keys.grad is None and method.pool.grad is not None
    for slot in range(len(method.blocks)):
        times = Counter(n for chosen in choices(method, slot, query) for n in chosen)
        for n in range(6):
            expected = torch.full((SMALL[name]["tokens"], WIDTH), float(times[n]))
            if name != "l2p":
                expected[2:] *= 2
            assert torch.equal(method.pool.grad[slot, n], expected)
