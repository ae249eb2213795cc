"""`probprompt data`: datasets are downloaded and checked."""

import hashlib
import io
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from probprompt.cli.console import Screen
from probprompt.data import verify
from probprompt.data.published import Cifar100, Cub200, Dataset, Figures, ImageNetR, Source, TuBerlin

Answer = tuple[int, str, str]
Command = Callable[..., Answer]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROBPROMPT_DATA", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


def image(color: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (color % 256, color // 256, 0)).save(content, "PNG")
    return content.getvalue()


def tree(folder: Path, train: int = 4, test: int = 2, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    color = 0
    for side, count in (("train", train), ("test", test)):
        for name in classes:
            (folder / side / name).mkdir(parents=True)
            for index in range(count):
                (folder / side / name / f"{index}.png").write_bytes(image(color))
                color += 1
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-100 and TU-Berlin, as if they had been published with two classes."""
    monkeypatch.setattr(Cifar100, "figures", Figures(2, 8, 4, (4, 4), (2, 2), shared=1))
    monkeypatch.setattr(TuBerlin, "figures", Figures(2, 8, 2, (4, 4), (1, 1)))


@pytest.fixture
def check(probprompt: Command) -> Callable[..., str]:
    """Run `data check`, assert its exit code and return its output."""

    def run(code: int, *arguments: object) -> str:
        exit_code, out, _ = probprompt("data", "check", *arguments)
        assert exit_code == code, out
        return out

    return run


Check = Callable[..., str]


def test_check_compares_with_what_was_published(tmp_path: Path, check: Check, small: None) -> None:
    root = tree(tmp_path / "cifar100")
    out = check(0, root)
    assert f"cifar100 in {root}" in out and "classes: 2" in out and out.rstrip().endswith("No problems found.")
    assert "train: 8 images, 4 per class" in out and "test: 4 images, 2 per class" in out
    (root / "train" / "dog" / "1.png").unlink()
    out = check(1, root, "--benchmark", "cifar100")
    assert "PROBLEM: train: 7 images, published: 8" in out
    assert "PROBLEM: train: expected 4 images per class, but dog has 3" in out
    assert "PROBLEM: test" not in out and "2 kind(s) of problems" in out
    other = tree(tmp_path / "other" / "cifar100", classes=("cat", "cow", "dog"))
    assert "PROBLEM: 3 classes, published: 2" in check(1, other, "--quick")


def test_unreadable_files_are_named(tmp_path: Path, check: Check, small: None) -> None:
    root = tree(tmp_path / "cifar100")
    (root / "test" / "cat" / "0.png").write_bytes(image(7)[:40])
    assert "PROBLEM: 1 unreadable file(s): test/cat/0.png (" in check(1, root)
    check(0, root, "--quick")  # only counts
    own = tree(tmp_path / "mine")
    (own / "test").rename(own / "val")
    (own / "val" / "cat" / "1.png").write_bytes(b"none")
    (own / "train" / "dog" / "0.png").write_bytes(b"none")
    out = check(1, own)
    assert "2 unreadable file(s): train/dog/0.png (" in out and ", val/cat/1.png (" in out
    assert "1 unreadable file(s): dog/0.png (" in check(1, own / "train")


def test_images_in_both_splits(tmp_path: Path, check: Check, small: None) -> None:
    root = tree(tmp_path / "cifar100")
    Image.open(root / "train" / "cat" / "3.png").save(root / "test" / "dog" / "1.png", compress_level=1)
    assert (root / "test" / "dog" / "1.png").read_bytes() != (root / "train" / "cat" / "3.png").read_bytes()
    assert "note: 1 test image(s) are also training images: test/dog/1.png = train/cat/3.png" in check(0, root)
    (root / "test" / "dog" / "0.png").write_bytes((root / "train" / "dog" / "0.png").read_bytes())
    out = check(1, root)
    assert "PROBLEM: 2 test image(s) are also training images" in out and "The published data has 1" in out


@pytest.mark.parametrize("kind", [Cub200, ImageNetR, TuBerlin], ids=lambda kind: kind.name)
def test_images_in_both_splits_where_the_published_number_is_unknown(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch, kind: type[Dataset]
) -> None:
    monkeypatch.setattr(kind, "figures", Figures(2, 8, 4, (4, 4), (2, 2), shared=kind.figures.shared))
    root = tree(tmp_path / kind.name)
    (root / "test" / "dog" / "1.png").write_bytes((root / "train" / "cat" / "3.png").read_bytes())
    out = check(0, root)
    assert "note: 1 test image(s) are also training images: test/dog/1.png = train/cat/3.png" in out
    assert "published number is unknown" in out


def test_own_folder_is_checked_without_figures(tmp_path: Path, check: Check) -> None:
    root = tree(tmp_path / "mine")
    out = check(0, root)
    assert "classes: 2" in out and "published" not in out and "held out" not in out
    (root / "test" / "cat" / "0.png").write_bytes((root / "train" / "dog" / "0.png").read_bytes())
    (root / "train" / "cat" / "0.png").write_bytes((root / "train" / "cat" / "1.png").read_bytes())
    out = check(1, root)
    assert "PROBLEM: 1 test image(s) are also training images: test/cat/0.png = train/dog/0.png" in out
    assert "note: 1 duplicate image(s) in train" in out
    assert "holds out 20% of each class" in check(0, root / "train")
    for name in ("cat", "dog"):
        for place in ("indoors", "outdoors"):
            shutil.copytree(root / "train" / name, tmp_path / "deep" / name / place)
    assert "pass a folder such as" in check(0, tmp_path / "deep", "--quick")


@pytest.mark.parametrize("within", ["images", ""])
def test_part_of_imagenet_is_an_own_folder(tmp_path: Path, check: Check, within: str) -> None:
    """The training images of Tiny-ImageNet: 200 folders named as in WordNet."""
    for number in range(200):
        folder = tmp_path / "train" / f"n{number:08}" / within
        folder.mkdir(parents=True)
        for index in range(2):
            (folder / f"n{number:08}_{index}.JPEG").write_bytes(b"")
    out = check(0, tmp_path / "train", "--quick")
    assert "classes: 200" in out and "imagenet-r" not in out


def test_dataset_in_folder_of_datasets_is_found(tmp_path: Path, probprompt: Command, check: Check, small: None) -> None:
    root = tree(tmp_path / "sets" / "cifar100")
    out = check(0, tmp_path / "sets")
    assert f"cifar100 in {root}" in out and "train: 8 images, 4 per class" in out
    tree(tmp_path / "sets" / "tu-berlin")
    code, _, err = probprompt("data", "check", tmp_path / "sets")
    assert code == 2 and f"contains 2 datasets. Choose one of {root}, {root.parent / 'tu-berlin'}" in err.replace(
        "\n", " "
    )
    check(0, tmp_path / "sets", "--benchmark", "cifar100")


def test_incomplete_and_missing_datasets(tmp_path: Path, check: Check) -> None:
    root = tmp_path / "imagenet-r"
    for name in ("n00000001", "n00000002"):
        (root / name).mkdir(parents=True)
        (root / name / "art_0.jpg").write_bytes(b"")
    out = check(1, tmp_path)
    assert f"PROBLEM: {root}: the lists" in out
    assert f"probprompt data get imagenet-r --dir {tmp_path}" in out
    assert "PROBLEM: cub200 not found" in check(1, "cub200")
    out = check(1, tmp_path, "--benchmark", "tu-berlin")
    assert f"PROBLEM: {tmp_path} does not contain tu-berlin" in out and "not on this machine" not in out


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("/no/such/place",), "is not a folder"),
        ((".", "--benchmark", "cifar10"), "'cifar10'. Did you mean 'cifar100'?"),
        ((".", "--benchmark", "emoji-r"), "'emoji-r'. Expected one of: cifar100"),
    ],
)
def test_wrong_arguments(probprompt: Command, arguments: tuple[str, ...], problem: str) -> None:
    code, _, err = probprompt("data", "check", *arguments)
    assert code == 2 and problem in err


def test_lists_of_images(tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    root, names = tmp_path / "set", ("n00000001", "n00000002")
    monkeypatch.setattr(ImageNetR, "figures", Figures(2, 2, 2, (1, 1), (1, 1)))
    for place, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for index in range(2):
            (root / name / f"{index}.png").write_bytes(image(2 * place + index))
    for index, side in enumerate(("train", "test")):
        (root / f"{side}.txt").write_text(f"n00000001/{index}.png\nn00000002/{index}.png\n")
    out = check(0, root)
    assert f"split by {root / 'train.txt'} and {root / 'test.txt'}" in out
    for side, name in (("training", "train.txt"), ("test", "test.txt")):
        digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        assert f"note: the list of {side} images is not the published one (SHA-256 {digest})" in out
    monkeypatch.setattr(ImageNetR, "figures", Figures(2, 8, 4, (4, 4), (2, 2)))
    out = check(0, tree(tmp_path / "imagenet-r", classes=names))
    assert "note: no lists of training and test images" in out


@pytest.mark.parametrize("options", [(), ("--quick",)])
def test_other_encodings_than_published_are_noted(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setattr(Cifar100, "figures", Figures(2, 8, 4, (4, 4), (2, 2), encoding="lossless", size=(4, 4)))
    root = tree(tmp_path / "cifar100")
    assert "note" not in check(0, root, *options)
    Image.new("RGB", (9, 7)).save(root / "test" / "dog" / "1.jpg", quality=20)
    (root / "test" / "dog" / "1.png").unlink()
    out = check(0, root, *options)
    assert "note: images are JPEG files, published are images without loss" in out
    assert out.count("note: images have 9 x 7 pixels, published are 4 x 4") == 1
    monkeypatch.setattr(verify, "_NUM_HEADERS", 1)  # files that are examined without reading all
    assert ("9 x 7" in check(0, root, *options)) is (options == ())


def sketches(path: Path, images: int = 5) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for place, name in enumerate(("airplane", "flying bird")):
            for index in range(images):
                archive.writestr(f"png/{name}/{images * place + index}.png", image(images * place + index))
    return path


def publish(archive: Path, monkeypatch: pytest.MonkeyPatch, url: str = "https://example.org/sketches_png.zip") -> Path:
    """Let an archive be the published one."""
    monkeypatch.setattr(TuBerlin, "sources", (Source(url, "md5", hashlib.md5(archive.read_bytes()).hexdigest()),))
    return archive


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the folder ``www``."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "www").mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "www")))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("terminal", [True, False])
def test_transfer_is_shown(terminal: bool) -> None:
    screen, drawn = Screen(), io.StringIO()
    screen.console = Console(file=drawn, force_terminal=terminal, width=120)
    with screen.transfer("a.zip", 4000, done=1000):
        screen.advance(2000)
    assert ("3.0/4.0 kB" in drawn.getvalue()) is terminal
    assert ("a.zip: done" in drawn.getvalue()) is not terminal


def test_get_from_a_local_archive(
    tmp_path: Path, home: Path, probprompt: Command, check: Check, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = publish(sketches(tmp_path / "sketches_png.zip"), monkeypatch)
    code, out, err = probprompt("data", "get", "tu-berlin", "--file", archive)
    assert code == 0, out + err
    assert f"tu-berlin: {home / 'tu-berlin'}" in out and "No problems found." in out
    assert (home / "tu-berlin" / "png" / "flying bird" / "7.png").is_file()
    code, out, _ = probprompt("data", "get", "tu-berlin")
    assert code == 0 and "already" in out
    assert "train: 8 images, 4 per class" in check(0, "tu-berlin")


def test_get_from_a_mirror(
    web: str, tmp_path: Path, probprompt: Command, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(sketches(tmp_path / "www" / "mirror.zip"), monkeypatch, f"{web}/gone/sketches_png.zip")
    code, _, err = probprompt("data", "get", "tu-berlin", "--dir", tmp_path / "other")
    assert code == 2 and "404" in err and "--url" in err
    code, out, err = probprompt("data", "get", "tu-berlin", "--dir", tmp_path / "other", "--url", f"{web}/mirror.zip")
    assert code == 0, out + err
    assert "sketches_png.zip: done" in out and "unpacking: done" in out
    assert f"export PROBPROMPT_DATA={tmp_path / 'other'}" in out
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["tu-berlin"]


def test_get_of_wrong_data(tmp_path: Path, probprompt: Command, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = publish(sketches(tmp_path / "a.zip", images=10), monkeypatch)
    code, out, _ = probprompt("data", "get", "tu-berlin", "--file", archive)
    assert code == 1 and "PROBLEM: train: 16 images, published: 8" in out
    code, _, err = probprompt("data", "get", "cifar100", "--file", tmp_path / "a.zip")
    assert code == 2 and "eb9058c3a382ffc7106e4002c42a8d85" in err
    assert hashlib.md5((tmp_path / "a.zip").read_bytes()).hexdigest() in err
    code, _, err = probprompt("data", "get", "cub")
    assert code == 2 and "Did you mean 'cub200'?" in err


def test_benchmarks_are_listed(home: Path, probprompt: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(home / "cifar100")
    code, out, _ = probprompt("list", "benchmarks")
    assert code == 0
    rows = {line.split()[0]: line.rstrip() for line in out.splitlines()}
    assert rows["cifar100"].endswith("10 tasks  yes") and rows["emoji-r"].endswith("5 tasks   packaged")
    for name in ("cub200", "imagenet-r", "tiny-imagenet", "tu-berlin"):
        assert rows[name].endswith("10 tasks  no")
    assert "by its path" in rows["FOLDER"] and "Hugging Face" in rows["hf:OWNER/NAME"]
    assert f"Folder for datasets: {home}\n" in out and "probprompt data get NAME" in out

    def homeless() -> Path:
        raise RuntimeError

    for variable in ("PROBPROMPT_DATA", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    code, out, _ = probprompt("list", "benchmarks")
    assert code == 0 and "cifar100" in out and "Set PROBPROMPT_DATA" in out
