"""Models go to the hub and come back the same, or not at all: against a stand-in of the hub, over real HTTP."""

import hashlib
import json
import pickle
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from local_hub import ROUTES, TOKEN, Hub, Repository, alone
from probprompt import ContinualClassifier, api, load_model
from probprompt.errors import UserError
from probprompt.export.bundle import LIST, read_record
from probprompt.export.card import MARKER, make_card
from probprompt.export.push_pull import pull, push
from probprompt.progress import ProgressCallback
from probprompt.runs.run import Run
from run_cases import Bomb

Command = Callable[..., Any]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in, which the hub's client takes for the hub; nothing else can be reached."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with alone(monkeypatch, tmp_path) as made:
        yield made


def some(pictures: Path, first: int, last: int) -> dict[str, list[Path]]:
    return {f"class{label}": sorted((pictures / f"class{label}").iterdir()) for label in range(first, last)}


def make(pictures: Path, folder: Path, weights: str = "random") -> ContinualClassifier:
    method = {"samples": 2, "components": 2, "tokens": 2, "blocks": [0]}
    backbone = {"name": "test_vit", "weights": weights, "image_size": 32}
    config = {"backbone": backbone, "method": method, "training": {"epochs": 1}, "head": {"projections": 40}}
    classifier = ContinualClassifier(config=config)
    classifier.learn(some(pictures, 0, 3), note="first | <b>photos</b>")
    classifier.save(folder)
    return classifier


@pytest.fixture(scope="module")
def learned(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a classifier of five classes, learned in two tasks; not to be changed."""
    folder = tmp_path_factory.mktemp("models") / "model"
    classifier = make(pictures, folder)
    classifier.learn(some(pictures, 3, 5))
    classifier.save(folder)
    return folder


def shown(folder: Path) -> list[Any]:
    noise = list(np.random.RandomState(0).randint(0, 256, (4, 40, 40, 3)).astype(np.uint8))
    return [(one.top, one.novelty) for one in ContinualClassifier.load(folder).predict(noise, top_k=5)]


def state_of(folder: Path, version: int) -> dict[str, Any]:
    note: dict[str, Any] = json.loads((folder / "versions" / f"{version}.json").read_text())["state"]
    return note


def card_of(hub: Hub, name: str) -> Any:
    """As the hub's client reads it."""
    return ModelCard(hub.repositories[name].files["README.md"].decode())


def refused(folder: Path, message: str, name: str = "me/birds", **more: Any) -> None:
    """Pulling fails with this message, and leaves nothing."""
    with pytest.raises(UserError, match=message):
        pull(name, folder / "again", **more)
    assert leftovers(folder) == []


def leftovers(folder: Path) -> list[str]:
    """Names of what is in the folder besides the cache."""
    return sorted(path.name for path in folder.iterdir() if path.name not in ("cache", "none"))


def tamper(content: bytes) -> bytes:
    """Return the content with its last bit flipped."""
    return content[:-1] + bytes([content[-1] ^ 1])


def test_a_classifier_comes_back_with_what_prediction_needs_alone(
    hub: Hub, learned: Path, pictures: Path, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = probprompt("model", "push", learned, "me/birds")
    assert answer.code == 0 and "5 files" in answer.out and "--trainable" in answer.out, answer.err
    needed = [state_of(learned, 2)["parts"][name] for name in ("method", "head", "gaussians")]
    sent = set(hub.repositories["me/birds"].files) - {".gitattributes"}
    assert sent == {"README.md", "probprompt.json", "current.json", "versions/2.json"} | {
        f"objects/{digest}.safetensors" for digest in needed
    }
    assert not hub.repositories["me/birds"].private

    refuse = Mock(side_effect=AssertionError("something was unpickled"))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", refuse)
        for name in ("load", "loads", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        answer = probprompt("model", "pull", "me/birds", tmp_path / "again")
        assert answer.code == 0 and "predicts but cannot learn" in answer.out, answer.err
        assert shown(tmp_path / "again") == shown(learned)
    assert leftovers(tmp_path) == ["again"]
    classifier = ContinualClassifier.load(tmp_path / "again")
    with pytest.raises(UserError, match="statistics"):
        classifier.learn(some(pictures, 5, 6))
    assert classifier.version == 2 and len(classifier.classes) == 5


def test_statistics_make_it_learn(hub: Hub, learned: Path, pictures: Path, tmp_path: Path, probprompt: Command) -> None:
    assert probprompt("model", "push", learned, "me/birds", "--trainable").code == 0
    assert "can learn more classes" in probprompt("model", "pull", "me/birds", tmp_path / "again").out
    here, there = (ContinualClassifier.load(folder) for folder in (learned, tmp_path / "again"))
    answers = []
    for classifier in (here, there):
        classifier.learn(some(pictures, 5, 6))
        answers.append([one.top for one in classifier.predict(pictures / "class5", top_k=6)])
    assert answers[0] == answers[1]


def test_later_push_replaces_its_own(hub: Hub, learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = push(learned, "me/birds", with_statistics=True)
    repository, notes = hub.repositories["me/birds"], list[str]()
    own = {"photo.png": b"mine", "README.md": b"# My birds"}
    repository.commit({**repository.files, **own})
    classifier = ContinualClassifier.load(learned)
    classifier.rename("class0", "robin")
    classifier.save(tmp_path / "renamed")
    monkeypatch.setattr(ProgressCallback, "note", lambda watcher, text: notes.append(text))
    push(tmp_path / "renamed", "me/birds")
    files = repository.files
    assert "versions/3.json" in files and "versions/2.json" not in files
    before = json.loads(repository.commits[1][1][LIST])["files"]
    assert sum(path.startswith("objects/") for path in files) == 3 < len(before)
    assert own.items() <= files.items()
    assert notes == ["Kept the custom model card of me/birds."]
    pull("me/birds", tmp_path / "new")
    pull("me/birds", tmp_path / "old", revision=first.commit)
    assert "robin" in ContinualClassifier.load(tmp_path / "new").classes
    assert "robin" not in ContinualClassifier.load(tmp_path / "old").classes
    with pytest.raises(UserError, match="revision not found"):
        pull("me/birds", tmp_path / "none-such", revision="v7")


def test_the_model_of_a_run_travels_with_scores(hub: Hub, settings: Command, tmp_path: Path, pictures: Path) -> None:
    run = api.train(out=tmp_path / "run", config=settings(training={"epochs": 1}, alignment={"epochs": 1}))
    push(run.folder, "me/run")
    card = card_of(hub, "me/run")
    (result,) = card.data.eval_results
    assert result.metric_value == round(run.metrics["FAA"], 2) and result.dataset_name == pictures.name
    assert f"Measured on test images of {pictures.name}" in card.text and "final average accuracy" in card.text
    assert str(pictures) not in card.content
    run.update(evaluated_on="validation")
    chosen = ModelCard(make_card(read_record(run.folder), "me/run", statistics=False))
    assert not vars(chosen.data).get("eval_results") and "Measured on held-out training images" in chosen.text
    pull("me/run", tmp_path / "again")
    images = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    loaded, before = load_model(tmp_path / "again"), load_model(run.folder)
    assert torch.equal(loaded.model.predict(images), before.model.predict(images))
    assert not Run(tmp_path / "again").report.exists()


def test_the_card_says_what_the_record_says(hub: Hub, learned: Path) -> None:
    push(learned, "me/birds")
    card = card_of(hub, "me/birds")
    assert card.data.library_name == "probprompt" and card.data.pipeline_tag == "image-classification"
    assert "probprompt" in card.data.tags
    for said in (
        MARKER,
        "An image classifier of 5 classes",
        ", ".join(f"class{label}" for label in range(5)),
        f"Temperature {state_of(learned, 2)['calibration']['temperature']:.3g}",
        json.loads((learned / "versions" / "2.json").read_text())["settings"]["backbone"]["sha256"],
        "ContinualClassifier.load",
        "probprompt model pull me/birds model/",
        "No test accuracy is recorded",
    ):
        assert said in card.content
    rows = [line for line in card.content.splitlines() if " | learned | " in line]
    assert [row.split("|")[1].strip() for row in rows] == ["1", "2"]


@pytest.mark.parametrize("name", ["a|b", "<script>alert(1)</script>", "two\nlines", "`code` *bold* [x](y)", "---"])
def test_names_of_classes_are_text_and_nothing_else(learned: Path, name: str) -> None:
    record = read_record(learned)
    note = json.loads(json.dumps(record.note))
    note["state"]["classes"][0]["name"] = name
    content = make_card(replace(record, note=note), "me/birds", statistics=False)
    assert re.search(r"(?<!\\)<script", content) is None
    assert vars(ModelCard(content).data)["library_name"] == "probprompt"
    line = next(line for line in content.splitlines() if "class1, class2" in line and not line.startswith("|"))
    assert line.endswith(", class1, class2, class3, class4") and re.search(r"(?<!\\)[|`*\[]", line) is None


def test_private_means_private(hub: Hub, learned: Path, probprompt: Command) -> None:
    assert probprompt("model", "push", learned, "me/secret", "--private").code == 0
    assert hub.repositories["me/secret"].private
    hub.repositories["me/open"] = Repository()
    before = hub.repositories["me/open"].commit({})
    answer = probprompt("model", "push", learned, "me/open", "--private")
    assert answer.code == 2 and "me/open is public" in answer.err
    assert [commit for commit, _ in hub.repositories["me/open"].commits] == [before]


def test_tokens_are_told_apart(hub: Hub, learned: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"you/birds .*Use one with write access"):
        push(learned, "you/birds")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match=r"me/birds .*The token is invalid"):
        push(learned, "me/birds")
    assert not hub.repositories
    hub.requests.clear()
    monkeypatch.delenv("HF_TOKEN")
    answer = probprompt("model", "push", learned, "me/birds")
    assert answer.code == 2 and "hf auth login" in answer.err
    assert not hub.requests


@pytest.mark.parametrize("name", ["birds", "me/birds/more", "me/../birds", "https://hub/me/birds", "me/", "me/b--c"])
def test_invalid_names_are_refused_first(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="owner/name"):
        push(tmp_path, name)
    with pytest.raises(UserError, match="owner/name"):
        pull(name, tmp_path / "model")


def test_what_is_no_whole_model_is_not_sent(hub: Hub, learned: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(learned, tmp_path / "model"))
    path = folder / "objects" / f"{state_of(folder, 2)['parts']['head']}.safetensors"
    path.write_bytes(tamper(path.read_bytes()))
    with pytest.raises(UserError, match=rf"{path.name} is corrupted"):
        push(folder, "me/birds")
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name} does not exist"):
        push(folder, "me/birds")
    with pytest.raises(UserError, match="contains no model"):
        push(tmp_path, "me/birds")
    assert not hub.requests


def test_another_commit_in_between_is_noticed(hub: Hub, learned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(learned, "me/birds")
    preupload = Hub.preupload

    def and_another(self: Hub, to: BaseHTTPRequestHandler, body: bytes, repo: str) -> None:
        self.repositories[repo].commit({"theirs": b""})
        preupload(self, to, body, repo)

    (page,) = (pattern for pattern in ROUTES if "preupload" in pattern)
    monkeypatch.setitem(ROUTES, page, and_another)
    with pytest.raises(UserError, match="Try again"):
        push(learned, "me/birds")
    assert hub.repositories["me/birds"].files == {"theirs": b""}


@pytest.fixture
def sent(hub: Hub, learned: Path) -> Repository:
    push(learned, "me/birds")
    return hub.repositories["me/birds"]


def largest(repository: Repository) -> str:
    return max(repository.files, key=lambda path: len(repository.files[path]))


def test_a_download_that_is_cut_goes_on_where_it_was(
    hub: Hub, sent: Repository, learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    path = largest(sent)
    hub.cuts[path] = [1000, *[0] * 20]
    refused(tmp_path, "download me/birds .*files are kept")
    hub.cuts[path] = [1000, 2000]
    hub.requests.clear()
    pull("me/birds", tmp_path / "again")
    assert shown(tmp_path / "again") == shown(learned)
    assert not hub.cuts[path] and sum(one.startswith("GET") and path in one for one in hub.requests) == 3


def test_a_damaged_file_in_the_cache_is_fetched_anew(hub: Hub, sent: Repository, learned: Path, tmp_path: Path) -> None:
    pull("me/birds", tmp_path / "first")
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        path.write_bytes(b"something else")
    pull("me/birds", tmp_path / "again")
    assert shown(tmp_path / "again") == shown(learned)


def relist(repository: Repository, change: Callable[[Any], object], **files: bytes) -> None:
    """Another commit, whose list says something else."""
    listing = json.loads(repository.files["probprompt.json"])
    change(listing)
    repository.commit({**repository.files, **files, "probprompt.json": json.dumps(listing).encode()})


def entry(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


@pytest.mark.parametrize(
    "path", ["../evil.json", "/etc/evil.json", "objects/../../x.json", "model.pkl", "versions/2.json\n", "README.md"]
)
def test_a_list_that_names_other_files_is_refused(hub: Hub, sent: Repository, tmp_path: Path, path: str) -> None:
    relist(sent, lambda listing: listing["files"].update({path: entry(b"evil")}), **{path: b"evil"})
    hub.requests.clear()
    refused(tmp_path, "not a file of a model")
    assert not any("evil" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda listing: listing.update(format=9), "format 9, but this version reads 1"),
        (lambda listing: listing.pop("files"), "is corrupted"),
        (lambda listing: listing.update(files=[1]), "is corrupted"),
        (lambda listing: listing.pop("statistics"), "is corrupted"),
        (lambda listing: listing["files"]["current.json"].pop("sha256"), r"files\.current\.json\.sha256"),
        (lambda listing: listing["files"].pop(max(listing["files"])), "me/birds is incomplete|Could not read"),
        (lambda listing: listing["files"].pop("current.json"), "contains no model"),
    ],
)
def test_a_list_that_is_wrong_is_refused(hub: Hub, sent: Repository, tmp_path: Path, change: Any, said: str) -> None:
    relist(sent, change)
    refused(tmp_path, said)


def test_other_content_in_place_of_tensors_is_refused_unread(hub: Hub, sent: Repository, tmp_path: Path) -> None:
    path, other, *_ = sorted(name for name in sent.files if name.startswith("objects/"))
    sent.commit({**sent.files, path: tamper(sent.files[path])})
    refused(tmp_path, f"{path} of me/birds .*expected SHA-256")
    for content, message in (
        (sent.files[other], "does not match the hash in its name"),
        (pickle.dumps(Bomb(tmp_path / "executed")), "corrupted and was not loaded"),
    ):
        named = {path: entry(content)}
        relist(sent, partial(lambda named, listing: listing["files"].update(named), named), **{path: content})
        refused(tmp_path, message)


def test_what_is_not_there_is_told(hub: Hub, sent: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path, "no model me/nothing, or it is private", "me/nothing")
    hub.repositories["me/other"] = Repository()
    hub.repositories["me/other"].commit({"config.json": b"{}"})
    refused(tmp_path, r"me/other .*no probprompt\.json", "me/other")
    refused(tmp_path, "Remove --weights", weights=tmp_path / "any.safetensors")
    sent.private = True
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(tmp_path, "it is private")


def test_an_unreachable_hub_is_told(hub: Hub, learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        begun = time.monotonic()
        with pytest.raises(UserError, match="download me/birds"):
            pull("me/birds", tmp_path / "again")
        with pytest.raises(UserError, match="upload me/birds"):
            push(learned, "me/birds")
        assert time.monotonic() - begun < 10


def test_a_folder_that_holds_something_is_left_alone(hub: Hub, sent: Repository, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        pull("me/birds", tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    pull("me/birds", tmp_path / "empty")
    assert (tmp_path / "empty" / "current.json").is_file() and (tmp_path / "mine" / "file").read_text() == "mine"


def test_a_backbone_from_a_file_is_named_again(hub: Hub, pictures: Path, tmp_path: Path, probprompt: Command) -> None:
    for name, seed in (("tiny", 1), ("other", 2)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            save_file(timm.create_model("test_vit", num_classes=0).state_dict(), tmp_path / f"{name}.safetensors")
    make(pictures, tmp_path / "model", weights=str(tmp_path / "tiny.safetensors"))
    push(tmp_path / "model", "me/birds")
    everything = b"".join(hub.repositories["me/birds"].files.values())
    assert str(tmp_path).encode() not in everything and b"tiny.safetensors" in everything
    there = tmp_path / "elsewhere.safetensors"
    (tmp_path / "tiny.safetensors").rename(there)
    answer = probprompt("model", "pull", "me/birds", tmp_path / "bare")
    assert answer.code == 0 and "Pull again with --weights FILE" in answer.out
    answer = probprompt("model", "pull", "me/birds", tmp_path / "wrong", "--weights", tmp_path / "other.safetensors")
    assert answer.code == 2 and "weights this model was trained with" in answer.err
    assert not (tmp_path / "wrong").exists()
    assert probprompt("model", "pull", "me/birds", tmp_path / "again", "--weights", there).code == 0
    assert len(shown(tmp_path / "again")) == 4
