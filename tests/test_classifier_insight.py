"""What a classifier tells of itself without images: held-out accuracy by version, and how different its prompts are."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from probprompt.classifier import ContinualClassifier

Emoji = dict[str, dict[str, list[bytes]]]


def pictures(emoji: Emoji, name: str, count: int) -> list[Image.Image]:
    return [Image.open(io.BytesIO(data)) for data in emoji["train"][name][:count]]


def test_the_matrix_follows_the_way_to_the_current_version(small_model: Path, tmp_path: Path, emoji: Emoji) -> None:
    classifier = ContinualClassifier.load(shutil.copytree(small_model, tmp_path / "model"))
    before = classifier.accuracy_matrix()
    assert (before.tasks, before.versions) == (("task 1", "task 2"), (1, 2))
    assert before.values[1][0] is None  # not known to version 1
    known = [value for row in before.values for value in row if value is not None]
    assert len(known) == 3 and all(value in (0.0, 25.0, 50.0, 75.0, 100.0) for value in known)  # four held out each
    classifier.learn({"heart": pictures(emoji, "heart", 6)}, name="hearts")
    with_hearts = classifier.accuracy_matrix()
    assert with_hearts.tasks[-1] == "hearts" and with_hearts.versions == (1, 2, 3)
    assert tuple(row[:2] for row in with_hearts.values[:2]) == before.values
    classifier.rollback(2)
    assert classifier.accuracy_matrix() == before  # what was undone is no part of the way
    classifier.rename("ball", "sphere")
    assert classifier.accuracy_matrix() == before
    classifier.save(tmp_path / "model")
    assert ContinualClassifier.load(tmp_path / "model").accuracy_matrix() == before


def test_prompt_diversity_compares_one_image_of_each_class(small_model: Path) -> None:
    found = ContinualClassifier.load(small_model).prompt_diversity()
    assert found is not None and found["labels"] == ["ball", "boat", "bird", "fruit"]
    matrix = np.array(found["matrix"])
    assert matrix.shape == (4, 4) and np.allclose(matrix.diagonal(), 1, atol=1e-3) and np.allclose(matrix, matrix.T)
    assert found["mean"] == pytest.approx((matrix.sum() - 4) / 12, abs=1e-3) and found["mean"] != found["initial_mean"]


def test_without_kept_queries_and_before_learning_there_is_nothing_to_tell(emoji: Emoji) -> None:
    classifier = ContinualClassifier(backbone="demo", method="ranpac", projections=100)
    assert classifier.accuracy_matrix().tasks == () and classifier.prompt_diversity() is None
    classifier.learn({name: pictures(emoji, name, 3) for name in ("ball", "boat")})
    assert classifier.prompt_diversity() is None
    assert classifier.accuracy_matrix().versions == (1,)
