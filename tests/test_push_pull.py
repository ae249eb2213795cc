"""Models go to the hub and come back the same, or not at all: against a stand-in of the hub, over real HTTP."""

import hashlib
import json
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import save_file

from local_hub import ROUTES, TOKEN, Hub, Repository, alone
from probprompt import ContinualClassifier, api, load_model
from probprompt.errors import UserError
from probprompt.export.bundle import LIST, read_record
from probprompt.export.card import MARK, make_card
from probprompt.export.push_pull import pull, push
from probprompt.progress import ProgressCallback
from probprompt.runs.run import Run

Command = Callable[..., Any]
BACKBONE = {"name": "test_vit", "weights": "random", "image_size": 32}

# Models to send ------------------------------------------------------------------------------------------------------


class Notes(ProgressCallback):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in, which the hub's client takes for the hub; nothing else can be reached."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with alone(monkeypatch, tmp_path) as made:
        yield made


def some(pictures: Path, first: int, last: int) -> dict[str, list[Path]]:
    return {f"class{label}": sorted((pictures / f"class{label}").iterdir()) for label in range(first, last)}


def make(pictures: Path, folder: Path, **backbone: Any) -> ContinualClassifier:
    classifier = ContinualClassifier(
        config={
            "backbone": {**BACKBONE, **backbone},
            "method": {"samples": 2, "components": 2, "tokens": 2, "blocks": [0]},
            "training": {"epochs": 1},
            "head": {"projections": 40},
        }
    )
    classifier.learn(some(pictures, 0, 3), name="first | <b>photos</b>")
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
    random = np.random.RandomState(0)
    pictures = [Image.fromarray(random.randint(0, 256, (40, 40, 3)).astype(np.uint8)) for _ in range(4)]
    return [(one.top, one.novelty) for one in ContinualClassifier.load(folder).predict(pictures, top_k=5)]


def parts(folder: Path) -> dict[str, Any]:
    note: dict[str, Any] = json.loads((folder / "versions" / "2.json").read_text())["state"]
    return note


def read_card(content: str) -> Any:
    """As the hub's client reads it."""
    return ModelCard(content)


def leftovers(folder: Path) -> list[str]:
    """What is beside the cache."""
    return sorted(path.name for path in folder.iterdir() if path.name not in ("cache", "none"))


# There and back ------------------------------------------------------------------------------------------------------


def test_a_classifier_comes_back_as_it_was_with_what_prediction_needs_alone(
    hub: Hub, learned: Path, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = probprompt("push", learned, "me/birds")
    assert answer.code == 0 and "5 files" in answer.out and "--with-statistics" in answer.out, answer.err
    needed = [parts(learned)["parts"][name] for name in ("method", "head", "gaussians")]
    sent = set(hub.repositories["me/birds"].files) - {".gitattributes"}
    assert sent == {"README.md", "probprompt.json", "current.json", "versions/2.json"} | {
        f"objects/{digest}.safetensors" for digest in needed
    }
    assert not hub.repositories["me/birds"].private

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    answer = probprompt("pull", "me/birds", tmp_path / "again")
    assert answer.code == 0 and "predicts, but was published without" in answer.out, answer.err
    assert shown(tmp_path / "again") == shown(learned)
    assert leftovers(tmp_path) == ["again"]


def test_a_model_without_statistics_refuses_to_learn_in_plain_words(
    hub: Hub, learned: Path, pictures: Path, tmp_path: Path
) -> None:
    push(learned, "me/birds")
    pull("me/birds", tmp_path / "again")
    classifier = ContinualClassifier.load(tmp_path / "again")
    with pytest.raises(UserError, match="statistics"):
        classifier.learn(some(pictures, 5, 6))
    assert classifier.version == 2 and len(classifier.classes) == 5


def test_with_statistics_it_goes_on_learning_as_the_one_here(
    hub: Hub, learned: Path, pictures: Path, tmp_path: Path, probprompt: Command
) -> None:
    assert probprompt("push", learned, "me/birds", "--with-statistics").code == 0
    answer = probprompt("pull", "me/birds", tmp_path / "again")
    assert "can learn further classes" in answer.out
    results = []
    for folder in (learned, tmp_path / "again"):
        classifier = ContinualClassifier.load(folder)
        classifier.learn(some(pictures, 5, 6))
        results.append([one.top for one in classifier.predict(pictures / "class5", top_k=6)])
    assert results[0] == results[1]


def test_a_later_push_removes_what_it_replaces_and_touches_nothing_else(
    hub: Hub, pictures: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    classifier = make(pictures, folder)
    first = push(folder, "me/birds", with_statistics=True)
    repository = hub.repositories["me/birds"]
    own = "# My birds"
    repository.commit({**repository.files, "photo.png": b"mine", "README.md": own.encode()})
    classifier.rename("class0", "robin")
    classifier.save(folder)
    notes = Notes()
    push(folder, "me/birds", progress=notes)
    files = repository.files
    assert "versions/2.json" in files and "versions/1.json" not in files
    assert (
        sum(path.startswith("objects/") for path in files)
        == 3
        < len(json.loads(repository.commits[1][1][LIST])["files"])
    )
    assert files["photo.png"] == b"mine" and files["README.md"] == own.encode()
    assert notes.notes == ["me/birds has a card of its own, which stays as it is"]
    pull("me/birds", tmp_path / "new")
    pull("me/birds", tmp_path / "old", revision=first.commit)
    assert "robin" in ContinualClassifier.load(tmp_path / "new").classes
    assert "robin" not in ContinualClassifier.load(tmp_path / "old").classes
    with pytest.raises(UserError, match="me/birds has no such revision"):
        pull("me/birds", tmp_path / "none-such", revision="v7")


def test_the_model_of_a_run_travels_with_its_scores(
    hub: Hub, settings: Command, tmp_path: Path, pictures: Path
) -> None:
    run = api.train(out=tmp_path / "run", config=settings(training={"epochs": 1}, alignment={"epochs": 1}))
    push(run.folder, "me/run")
    card = read_card(hub.repositories["me/run"].files["README.md"].decode())
    (result,) = card.data.eval_results
    assert result.metric_value == round(run.metrics["FAA"], 2) and result.dataset_name == pictures.name
    assert f"Measured on test images of {pictures.name}" in card.text and "final average accuracy" in card.text
    assert str(pictures) not in card.content
    run.update(evaluated_on="validation")
    chosen = read_card(make_card(read_record(run.folder), "me/run", statistics=False))
    assert chosen.data.eval_results is None and "Measured on held-out training images" in chosen.text
    pull("me/run", tmp_path / "again")
    images = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    loaded, before = load_model(tmp_path / "again"), load_model(run.folder)
    assert torch.equal(loaded.model.predict(images), before.model.predict(images))
    assert not Run(tmp_path / "again").report.exists()


# The card ------------------------------------------------------------------------------------------------------------


def test_the_card_says_what_the_record_says(hub: Hub, learned: Path) -> None:
    push(learned, "me/birds")
    content = hub.repositories["me/birds"].files["README.md"].decode()
    card = read_card(content)
    assert card.data.library_name == "probprompt" and card.data.pipeline_tag == "image-classification"
    assert card.data.tags and "probprompt" in card.data.tags
    assert MARK in content and "An image classifier of 5 classes" in content
    assert ", ".join(f"class{label}" for label in range(5)) in content
    state = parts(learned)
    assert f"Temperature {state['calibration']['temperature']:.3g}" in content
    assert json.loads((learned / "versions" / "2.json").read_text())["settings"]["backbone"]["sha256"] in content
    rows = [line for line in content.splitlines() if " | learned | " in line]
    assert [row.split(" | ")[0] for row in rows] == ["| 1", "| 2"]
    assert "ContinualClassifier.load" in content and "probprompt pull me/birds model/" in content
    assert "No accuracy on test images is recorded" in content


@pytest.mark.parametrize("name", ["a|b", "<script>alert(1)</script>", "two\nlines", "`code` *bold* [x](y)", "---"])
def test_names_of_classes_are_text_and_nothing_else(learned: Path, name: str) -> None:
    record = read_record(learned)
    note = json.loads(json.dumps(record.note))
    note["state"]["classes"][0]["name"] = name
    content = make_card(replace(record, note=note), "me/birds", statistics=False)
    assert re.search(r"(?<!\\)<script", content) is None and read_card(content).data.library_name == "probprompt"
    line = next(line for line in content.splitlines() if "class1, class2" in line and not line.startswith("|"))
    assert line.endswith(", class1, class2, class3, class4") and re.search(r"(?<!\\)[|`*\[]", line) is None


# What goes wrong on the way there ------------------------------------------------------------------------------------


def test_private_means_private(hub: Hub, learned: Path, probprompt: Command) -> None:
    assert probprompt("push", learned, "me/secret", "--private").code == 0
    assert hub.repositories["me/secret"].private
    hub.repositories["me/open"] = Repository()
    before = hub.repositories["me/open"].commit({})
    answer = probprompt("push", learned, "me/open", "--private")
    assert answer.code == 2 and "me/open is public: make it private on the hub first" in answer.err
    assert [commit for commit, _ in hub.repositories["me/open"].commits] == [before]


def test_without_a_token_nothing_is_asked(
    hub: Hub, learned: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    answer = probprompt("push", learned, "me/birds")
    assert answer.code == 2 and "push needs a token" in answer.err and "hf auth login" in answer.err
    assert not hub.requests


def test_a_wrong_token_and_another_owner_are_told_apart(
    hub: Hub, learned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"you/birds could not be sent to the hub: .*use one that may write"):
        push(learned, "you/birds")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match=r"me/birds could not be sent to the hub: .*the token is not valid"):
        push(learned, "me/birds")
    assert not hub.repositories


@pytest.mark.parametrize("name", ["birds", "me/birds/more", "me/../birds", "https://hub/me/birds", "me/", "me/b--c"])
def test_names_that_are_none_are_refused_before_anything_is_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no name of a repository: write owner/name"):
        push(tmp_path, name)
    with pytest.raises(UserError, match=r"is no name of a repository: write owner/name"):
        pull(name, tmp_path / "model")


def test_a_damaged_model_is_not_sent(hub: Hub, pictures: Path, tmp_path: Path) -> None:
    make(pictures, tmp_path / "model")
    state = json.loads((tmp_path / "model" / "versions" / "1.json").read_text())["state"]["parts"]
    path = tmp_path / "model" / "objects" / f"{state['head']}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"{path.name} is damaged"):
        push(tmp_path / "model", "me/birds")
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name} is missing"):
        push(tmp_path / "model", "me/birds")
    assert not hub.requests


def test_a_folder_without_a_model_is_not_sent(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        push(tmp_path, "me/birds")


def test_somebody_elses_commit_in_between_is_noticed(hub: Hub, learned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(learned, "me/birds")
    preupload = Hub.preupload

    def and_another(self: Hub, to: BaseHTTPRequestHandler, body: bytes, repo: str) -> None:
        self.repositories[repo].commit({"theirs": b""})
        preupload(self, to, body, repo)

    (page,) = (pattern for pattern in ROUTES if "preupload" in pattern)
    monkeypatch.setitem(ROUTES, page, and_another)
    with pytest.raises(UserError, match="somebody else changed the repository in the meantime: try again"):
        push(learned, "me/birds")
    assert hub.repositories["me/birds"].files == {"theirs": b""}


# What goes wrong on the way back -------------------------------------------------------------------------------------


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
    hub.cuts[path] = [1000, 2000]
    pull("me/birds", tmp_path / "again")
    assert shown(tmp_path / "again") == shown(learned)
    assert not hub.cuts[path] and sum(one.startswith("GET") and path in one for one in hub.requests) == 3


def test_a_download_that_stays_cut_leaves_nothing_and_goes_on_next_time(
    hub: Hub, sent: Repository, tmp_path: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    path = largest(sent)
    hub.cuts[path] = [1000, *[0] * 20]
    answer = probprompt("pull", "me/birds", tmp_path / "again")
    assert answer.code == 2 and "me/birds could not be fetched from the hub" in answer.err
    assert "try again; what arrived already is kept" in answer.err and leftovers(tmp_path) == []
    hub.cuts.clear()
    assert probprompt("pull", "me/birds", tmp_path / "again").code == 0


def test_a_file_with_another_hash_is_refused(hub: Hub, sent: Repository, tmp_path: Path, probprompt: Command) -> None:
    path = largest(sent)
    content = bytearray(sent.files[path])
    content[-1] ^= 1
    sent.commit({**sent.files, path: bytes(content)})
    answer = probprompt("pull", "me/birds", tmp_path / "again")
    assert answer.code == 2 and f"{path} of me/birds has the SHA-256" in answer.err, answer.err
    assert "damaged or was tampered with. Nothing was written" in answer.err and leftovers(tmp_path) == []


def test_a_damaged_file_in_the_cache_is_fetched_anew(hub: Hub, sent: Repository, learned: Path, tmp_path: Path) -> None:
    pull("me/birds", tmp_path / "first")
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        path.write_bytes(b"something else")
    pull("me/birds", tmp_path / "again")
    assert shown(tmp_path / "again") == shown(learned)


def relist(repository: Repository, change: Callable[[dict[str, Any]], object], **files: bytes) -> None:
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
    with pytest.raises(UserError, match="which is no file of a model"):
        pull("me/birds", tmp_path / "again")
    assert leftovers(tmp_path) == [] and not any("evil" in request for request in hub.requests)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda listing: listing.update(format=9), "has format 9, this version reads 1"),
        (lambda listing: listing.pop("files"), "is damaged"),
        (lambda listing: listing.update(files=[1]), "is damaged"),
        (lambda listing: listing.pop("statistics"), "is damaged"),
        (lambda listing: listing["files"]["current.json"].pop("sha256"), r"files\.current\.json\.sha256"),
        (lambda listing: listing["files"].pop(max(listing["files"])), "me/birds is not complete|cannot be read"),
        (lambda listing: listing["files"].pop("current.json"), "holds no model"),
    ],
)
def test_a_list_that_is_not_right_is_refused(
    hub: Hub, sent: Repository, tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    relist(sent, change)
    with pytest.raises(UserError, match=said):
        pull("me/birds", tmp_path / "again")
    assert leftovers(tmp_path) == []


def test_tensors_under_the_name_of_others_are_refused(hub: Hub, sent: Repository, tmp_path: Path) -> None:
    one, other = sorted(path for path in sent.files if path.startswith("objects/"))[:2]
    content = sent.files[other]
    relist(sent, lambda listing: listing["files"].update({one: entry(content)}), **{one: content})
    with pytest.raises(UserError, match="holds other tensors than its name says"):
        pull("me/birds", tmp_path / "again")
    assert leftovers(tmp_path) == []


def test_a_pickle_in_place_of_tensors_is_refused_unread(hub: Hub, sent: Repository, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    content, path = pickle.dumps(Evil()), largest(sent)
    relist(sent, lambda listing: listing["files"].update({path: entry(content)}), **{path: content})
    with pytest.raises(UserError, match="is damaged and was not loaded"):
        pull("me/birds", tmp_path / "again")
    assert leftovers(tmp_path) == []


def test_what_is_not_there_is_told(hub: Hub, sent: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="the hub has no model me/nothing, or it is private and not shown to you"):
        pull("me/nothing", tmp_path / "again")
    hub.repositories["me/other"] = Repository()
    hub.repositories["me/other"].commit({"config.json": b"{}"})
    with pytest.raises(UserError, match=r"me/other holds no model of probprompt: it has no probprompt\.json"):
        pull("me/other", tmp_path / "again")
    sent.private = True
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UserError, match="it is private and not shown to you"):
        pull("me/birds", tmp_path / "again")
    assert leftovers(tmp_path) == []


def test_a_hub_that_cannot_be_reached_is_told_at_once(
    hub: Hub, learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        begun = time.monotonic()
        with pytest.raises(UserError, match="me/birds could not be fetched from the hub"):
            pull("me/birds", tmp_path / "again")
        with pytest.raises(UserError, match="me/birds could not be sent to the hub"):
            push(learned, "me/birds")
        assert time.monotonic() - begun < 10


def test_a_folder_that_holds_something_is_left_alone(hub: Hub, sent: Repository, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(UserError, match="is there already and not empty: name a new folder"):
        pull("me/birds", tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    pull("me/birds", tmp_path / "empty")
    assert (tmp_path / "empty" / "current.json").is_file() and (tmp_path / "mine" / "file").read_text() == "mine"


# A backbone from a file ----------------------------------------------------------------------------------------------


def test_a_backbone_from_a_file_is_named_again_where_the_model_is_pulled(
    hub: Hub, pictures: Path, tmp_path: Path, probprompt: Command
) -> None:
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
    answer = probprompt("pull", "me/birds", tmp_path / "bare")
    assert answer.code == 0 and "pull with --weights FILE" in answer.out
    answer = probprompt("pull", "me/birds", tmp_path / "wrong", "--weights", tmp_path / "other.safetensors")
    assert answer.code == 2 and "name the file it was made with" in answer.err
    assert not (tmp_path / "wrong").exists()
    assert probprompt("pull", "me/birds", tmp_path / "again", "--weights", there).code == 0
    assert len(shown(tmp_path / "again")) == 4


def test_weights_are_not_asked_for_where_the_name_says_them(hub: Hub, sent: Repository, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is loaded by its name: leave --weights away"):
        pull("me/birds", tmp_path / "again", weights=tmp_path / "any.safetensors")
    assert leftovers(tmp_path) == []
