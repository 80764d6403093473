"""What `art-server host` refuses before it dials, and how it divides GPUs."""

from pathlib import Path

import pytest

from art_server.engine.device.detection import Gpu, Machine
from art_server.errors import InvalidInput, UsageError
from art_server.machines.host import main, make_offer, parse, read_token
from art_server.machines.obeying import check_path

CPU = Machine("cpu", (), 64 << 30, (0, 1))
CARDS = tuple(Gpu(index, f"GPU-{index}", "NVIDIA L4", 24 << 30, (8, 9)) for index in range(4))
GPUS = Machine("cuda", CARDS, 64 << 30, (0, 1))
REQUIRED = ["--join", "http://there:7623", "--token-file", "key"]


@pytest.mark.parametrize(
    ("flags", "serving", "training"),
    [
        ([], ((0,), (1,), (2,), (3,)), ()),
        (["--ranks", "1"], ((0,), (1,), (2,)), ((3,),)),
        (["--engines", "1", "--ranks", "2"], ((0, 1),), ((2,), (3,))),
        (["--engines", "0", "--ranks", "4"], (), ((0,), (1,), (2,), (3,))),
    ],
)
def test_ranks_take_the_last_gpus_and_engines_divide_the_others(
    flags: list[str], serving: tuple[tuple[int, ...], ...], training: tuple[tuple[int, ...], ...]
) -> None:
    offer = make_offer(parse([*REQUIRED, *flags]), GPUS)
    assert (offer.serving, offer.training) == (serving, training)


def test_a_cpu_offers_one_engine_and_shares_its_cores() -> None:
    offer = make_offer(parse([*REQUIRED, "--ranks", "2"]), CPU)
    assert (offer.serving, offer.training) == (((),), ((), ()))


@pytest.mark.parametrize(
    ("machine", "flags", "told"),
    [
        (GPUS, ["--engines", "3"], "--engines 3 --ranks 0: each rank needs a GPU and engines divide the others evenly"),
        (GPUS, ["--engines", "2", "--ranks", "3"], "this machine has 4; use numbers that fit"),
        (GPUS, ["--engines", "0"], "--engines 0 --ranks 0: offer at least one of them"),
        (CPU, ["--engines", "-1"], "offer at least one of them"),
        (CPU, ["--ranks", "3"], "--ranks 3: each needs a core, and this machine has 2; use --ranks 2 or fewer"),
        (CPU, ["--name", "a/b"], "--name 'a/b' (3 characters) is not a name"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused(machine: Machine, flags: list[str], told: str) -> None:
    with pytest.raises((UsageError, InvalidInput)) as caught:
        make_offer(parse([*REQUIRED, *flags]), machine)
    assert told in str(caught.value)


def test_a_token_file_that_has_no_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_token(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="is empty: write a key with the scope 'host'"):
        read_token(tmp_path / "empty")
    (tmp_path / "key").write_text("  joins host\n")
    assert read_token(tmp_path / "key") == "joins"


def test_the_command_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("joins")
    with pytest.raises(SystemExit) as ended:
        main(["--join", "gpu-box:7623", "--token-file", "key"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "art-server host: --join gpu-box:7623: write an address such as http://gpu-box:7623\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("name", ["../a", "a/../b", "/etc/passwd", ".hidden", "a/b/c", "a//b", "", "a\n", "a\0b"])
def test_a_name_that_leaves_its_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no file's name"):
        check_path(name)


def test_a_file_may_be_in_one_folder_more() -> None:
    assert check_path("mlp.up_proj/adapter_model.safetensors") == "mlp.up_proj/adapter_model.safetensors"
