"""L2P, L2P++ and Deep L2P++ against their rules, written down a second time with loops in float64."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from probprompt.backbone import FrozenViT
from probprompt.errors import UserError
from probprompt.methods import EVALUATION, Context, MethodConfig, Shape, parse_config, registered
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
TRAINING = Context(training=True, task=0)


def fresh(name: str, seed: int = 7, width: int = WIDTH, **settings: Any) -> PooledPrompts:
    """A small method before training."""
    config = parse_config({"name": name, **SMALL[name], **settings})
    method = registered()[name].create(config, Shape(width, DEPTH), seed)
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
    return 5 * torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def published(name: str) -> PooledPrompts:
    method = registered()[name].create(parse_config(name), Shape(768, 12), 0)
    assert isinstance(method, PooledPrompts)
    return method


# The rules once more


def cosine(one: Tensor, other: Tensor) -> float:
    first, second = list(map(float, one.detach())), list(map(float, other.detach()))
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / math.sqrt(sum(a * a for a in first)) / math.sqrt(sum(b * b for b in second))


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


def injected(method: PooledPrompts, query: Tensor, context: Context = EVALUATION) -> dict[int, Tensor]:
    """All tokens of every block, (B, P, D); of a prefix the keys, then the values."""
    found = {}
    for block, prompt in method.prompts(query, context).prompts.items():
        assert isinstance(prompt, Prefix | Tokens)
        both = prompt.tokens if isinstance(prompt, Tokens) else torch.cat([prompt.key, prompt.value], dim=1)
        found[block] = both.detach()
    return found


def loss_of(method: PooledPrompts, query: Tensor) -> Tensor:
    loss = method.prompts(query, TRAINING).loss
    assert loss is not None
    return loss


# What is injected


@pytest.mark.parametrize(
    ("name", "parameters", "tokens", "blocks"),
    [
        ("l2p", 10 * 5 * 768 + 10 * 768, 25, [0]),
        ("l2p++", 30 * 20 * 768 + 30 * 768, 100, [0]),
        ("deep-l2p++", 5 * (30 * 20 * 768 + 30 * 768), 100, [0, 1, 2, 3, 4]),
    ],
)
def test_the_published_sizes(name: str, parameters: int, tokens: int, blocks: list[int]) -> None:
    method = published(name)
    assert sum(parameter.numel() for parameter in method.parameters()) == parameters
    found = injected(method, torch.randn(2, 768, generator=torch.Generator().manual_seed(0)))
    assert list(found) == blocks
    assert all(prompt.shape == (2, tokens, 768) for prompt in found.values())


@pytest.mark.parametrize("context", [EVALUATION, TRAINING], ids=["evaluation", "training"])
@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_l2p_puts_the_chosen_entries_one_after_the_other_at_the_input(
    top_k: int, batchwise: bool, context: Context
) -> None:
    method, query = moved("l2p", top_k=top_k, batchwise=batchwise), some_queries()
    ((block, prompt),) = method.prompts(query, context).prompts.items()
    assert block == 0 and isinstance(prompt, Tokens) and prompt.positioned
    for image, chosen in enumerate(choices(method, 0, query)):
        expected = torch.cat([method.pool[0, n] for n in sorted(chosen)])
        assert torch.equal(prompt.tokens[image], expected)


@pytest.mark.parametrize("context", [EVALUATION, TRAINING], ids=["evaluation", "training"])
@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("name", PREFIXES)
def test_every_chosen_entry_brings_keys_and_values(name: str, batchwise: bool, context: Context) -> None:
    method, query = moved(name, batchwise=batchwise), some_queries()
    prompts = method.prompts(query, context).prompts
    assert list(prompts) == list(SMALL[name]["blocks"])
    for slot, prompt in enumerate(prompts.values()):
        assert isinstance(prompt, Prefix)
        for image, chosen in enumerate(choices(method, slot, query)):
            entries = [method.pool[slot, n] for n in sorted(chosen)]
            assert torch.equal(prompt.key[image], torch.cat([entry[:2] for entry in entries]))
            assert torch.equal(prompt.value[image], torch.cat([entry[2:] for entry in entries]))


def test_the_checks_above_look_at_different_choices() -> None:
    method, query = moved("deep-l2p++"), some_queries()
    every = [tuple(chosen) for slot in range(2) for chosen in choices(method, slot, query)]
    assert len(set(every)) > 6
    assert any(list(chosen) != sorted(chosen) for chosen in every)
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
    shown = method.relevance(query)[0][0, 0]
    assert shown.nonzero().flatten().tolist() == [0, 1, 2, 4, 5]
    assert torch.equal(injected(method, query)[0][0], method.pool[0, [0, 1, 2, 4, 5]].flatten(0, 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_length_of_a_query_does_not_matter(name: str) -> None:
    method, query = moved(name), some_queries()
    near, far = injected(method, query), injected(method, 100 * query)
    assert all(torch.equal(near[block], far[block]) for block in near)


@pytest.mark.parametrize("name", NAMES)
def test_relevance_is_the_share_of_the_chosen(name: str) -> None:
    for batchwise in (False, True):
        method, query = moved(name, batchwise=batchwise), some_queries()
        shown = method.relevance(query)
        assert list(shown) == list(method.blocks)
        for slot, block in enumerate(method.blocks):
            expected = torch.zeros(BATCH, 1, 6)
            for image, chosen in enumerate(choices(method, slot, query)):
                expected[image, 0, chosen] = 1 / 3
            torch.testing.assert_close(shown[block], expected)


def test_l2p_reads_out_its_tokens_and_the_others_the_class_token() -> None:
    assert (L2P.readout, L2PPlus.readout, DeepL2PPlus.readout) == ("tokens", "class", "class")
    assert all(method.query_readout == "class" and method.needs_query for method in (L2P, L2PPlus, DeepL2PPlus))


# Batch mates


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_depends_on_no_other_image(name: str) -> None:
    method, query = moved(name), some_queries(9)
    together, backwards = injected(method, query), injected(method, query.flip(0))
    for block, tokens in together.items():
        assert torch.equal(tokens, backwards[block].flip(0))
        for image in range(len(query)):
            assert torch.equal(tokens[image : image + 1], injected(method, query[image : image + 1])[block])


@pytest.mark.parametrize("name", NAMES)
def test_the_published_vote_makes_images_depend_on_each_other(name: str) -> None:
    method, query = moved(name, batchwise=True), some_queries(9)
    for block, tokens in injected(method, query).items():
        assert (tokens == tokens[0]).all()
        alone = [injected(method, query[image : image + 1])[block][0] for image in range(9)]
        assert any(not torch.equal(tokens[image], alone[image]) for image in range(9))


def test_the_vote_goes_by_number_then_by_index() -> None:
    method = fresh("l2p", width=3, components=4, top_k=2, batchwise=True)
    with torch.no_grad():
        method.keys.copy_(torch.tensor([[[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, -1, -1]]]))
    query = torch.tensor([[0.0, 1.0, 2.0], [0.0, 2.0, 1.0], [1.0, 0.0, 2.0]])  # chosen: 2 1, 1 2, 2 0
    for tokens in injected(method, query)[0]:  # three votes for 2, two for 1, one for 0
        assert torch.equal(tokens, method.pool[0, [1, 2]].flatten(0, 1))
    for tokens in injected(method, query[1:])[0]:  # two votes for 2, one for 1 and one for 0
        assert torch.equal(tokens, method.pool[0, [0, 2]].flatten(0, 1))


# The loss on the keys


@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("pull", [0.1, 1.0, 2.5])
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_pulls_the_chosen_keys(name: str, pull: float, batchwise: bool) -> None:
    method, query = moved(name, pull=pull, batchwise=batchwise), some_queries()
    loss = loss_of(method, query)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(pull * key_loss(method, query), rel=1e-5)
    assert method.prompts(query, EVALUATION).loss is None


@pytest.mark.parametrize("name", NAMES)
def test_without_pull_there_is_no_loss(name: str) -> None:
    assert moved(name, pull=0).prompts(some_queries(), TRAINING).loss is None


def test_the_published_weights_of_the_loss() -> None:
    assert [parse_config(name).model_dump()["pull"] for name in NAMES] == [0.1, 1.0, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_a_perfect_match(name: str) -> None:
    method, query = fresh(name), some_queries(1)
    with torch.no_grad():
        method.keys.copy_(3 * query.expand_as(method.keys))
    expected = -3 * 0.1 if name == "l2p" else 0
    assert loss_of(method, query.expand(4, -1)).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize("name", PREFIXES)
def test_the_published_loss_pairs_every_query_with_the_choice_of_every_image(name: str, batchwise: bool) -> None:
    method, query = moved(name, legacy_key_loss=True, batchwise=batchwise), some_queries()
    expected = 0.0
    for slot in range(len(method.blocks)):
        for row in query:
            for chosen in choices(method, slot, query):
                expected += sum(1 - cosine(row, method.keys[slot, n]) for n in chosen)
    assert loss_of(method, query).item() == pytest.approx(expected, rel=1e-5)
    correct = moved(name, batchwise=batchwise)
    assert expected > 4 * loss_of(correct, query).item()
    alone = query[:1]
    assert loss_of(method, alone).item() == pytest.approx(loss_of(correct, alone).item())
    before, after = injected(correct, query, TRAINING), injected(method, query, TRAINING)
    assert all(torch.equal(before[block], after[block]) for block in before)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_moves_an_images_keys_towards_it_and_no_others(name: str) -> None:
    method, query = moved(name), some_queries(1)
    loss_of(method, query).backward()
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


@pytest.mark.parametrize("name", PREFIXES)
def test_only_the_published_loss_pulls_keys_towards_queries_that_did_not_choose_them(name: str) -> None:
    query = some_queries(2, seed=4)

    def gradients(queries: Tensor, **settings: Any) -> Tensor:
        method = moved(name, **settings)
        (gradient,) = torch.autograd.grad(loss_of(method, queries), method.keys)
        return gradient

    method = moved(name)
    assert any(set(one) != set(other) for one, other in [choices(method, s, query) for s in range(len(method.blocks))])
    separate = gradients(query[:1]) + gradients(query[1:])
    torch.testing.assert_close(gradients(query), separate)
    assert not torch.allclose(gradients(query, legacy_key_loss=True), separate, atol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_train_the_chosen_entries_alone(name: str) -> None:
    method, query = moved(name), some_queries(2)
    prompts = method.prompts(query, TRAINING).prompts.values()
    total = sum(
        (prompt.tokens.sum() if isinstance(prompt, Tokens) else prompt.key.sum() + 2 * prompt.value.sum())
        for prompt in prompts
        if isinstance(prompt, Tokens | Prefix)
    )
    assert isinstance(total, Tensor)
    total.backward()
    assert method.keys.grad is None and method.pool.grad is not None
    for slot in range(len(method.blocks)):
        times = Counter(n for chosen in choices(method, slot, query) for n in chosen)
        for n in range(6):
            expected = torch.full((SMALL[name]["tokens"], WIDTH), float(times[n]))
            if name != "l2p":
                expected[2:] *= 2
            assert torch.equal(method.pool.grad[slot, n], expected)


# Initial parameters, saving and settings


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("initial", "low"), [("uniform", 0.0), ("symmetric", -1.0)])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_initial_numbers(name: str, initial: str, low: float, scale: float) -> None:
    method = fresh(name, width=300, initial=initial, initial_scale=scale)
    for parameter in (method.pool, method.keys):
        drawn = parameter.detach() / scale
        assert drawn.min() >= low and drawn.max() <= 1
        assert drawn.min() < low + 0.02 and drawn.max() > 0.98
        assert float(drawn.mean()) == pytest.approx((1 + low) / 2, abs=0.05)


def test_the_published_initial_numbers() -> None:
    assert published("l2p").keys.min() < -0.99
    assert all(published(name).keys.min() >= 0 and published(name).keys.max() > 0.99 for name in PREFIXES)


def test_what_is_drawn_depends_on_the_seed_and_the_block_alone() -> None:
    method, same, other = fresh("deep-l2p++"), fresh("deep-l2p++"), fresh("deep-l2p++", seed=8)
    single = fresh("l2p++", blocks=(3,))
    for name in ("pool", "keys"):
        ours = getattr(method, name)
        assert torch.equal(ours, getattr(same, name)) and not torch.equal(ours, getattr(other, name))
        assert not torch.equal(ours[0], ours[1])
        assert torch.equal(ours[1], getattr(single, name)[0])
    assert not torch.equal(method.pool[0, :, 0], method.keys[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_method_answers_as_before(name: str) -> None:
    method, loaded, query = moved(name), fresh(name, seed=9), some_queries()
    for task in range(3):
        loaded.begin_task(task, 2)
    assert set(method.state_dict()) == {"pool", "keys"}
    loaded.load_state_dict(method.state_dict())
    found, expected = injected(loaded, query), injected(method, query)
    assert all(torch.equal(found[block], expected[block]) for block in expected)


@pytest.mark.parametrize("name", NAMES)
def test_published_mistakes_are_never_the_default_and_always_marked(name: str) -> None:
    def marks(**settings: Any) -> tuple[str, ...]:
        config = parse_config({"name": name, **settings})
        assert isinstance(config, MethodConfig)
        return config.marks()

    assert marks() == ()
    (vote,) = marks(batchwise=True)
    assert vote.startswith("batchwise: ") and "batch mates" in vote
    if name != "l2p":
        (mistake,) = marks(legacy_key_loss=True)
        assert mistake.startswith("legacy_key_loss: ")
        assert marks(legacy_key_loss=True, batchwise=True) == (vote, mistake)


@pytest.mark.parametrize("name", PREFIXES)
@pytest.mark.parametrize("blocks", [(DEPTH,), (0, DEPTH + 3), (-1, 0)])
def test_blocks_outside_the_backbone_are_refused(name: str, blocks: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"blocks 0 to {DEPTH - 1}.*method\.blocks"):
        fresh(name, blocks=blocks)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *[(name, {"components": 4, "top_k": 5}) for name in NAMES],
        *[(name, {"top_k": 0}) for name in NAMES],
        *[(name, {"pull": -1}) for name in NAMES],
        *[(name, {"initial": "normal"}) for name in NAMES],
        *[(name, {"initial_scale": 0}) for name in NAMES],
        *[(name, {"tokens": 0}) for name in NAMES],
        *[(name, {"tokens": 5}) for name in PREFIXES],
        *[(name, {"blocks": ()}) for name in PREFIXES],
        *[(name, {"blocks": (1, 1)}) for name in PREFIXES],
        ("l2p", {"blocks": (0,)}),
        ("l2p", {"legacy_key_loss": True}),
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        parse_config({"name": name, **settings})


def test_an_odd_number_of_input_tokens_is_fine() -> None:
    assert injected(fresh("l2p", tokens=1), some_queries())[0].shape == (BATCH, 3, WIDTH)
