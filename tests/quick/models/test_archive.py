"""The tar of a checkpoint: the same bytes each time. Of what is received only a whole checkpoint passes."""

import io
import json
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from art_server.errors import InvalidInput, NotFound
from art_server.store.adapter import read_lora
from art_server.store.adapter_layers import Layers
from art_server.store.adapter_tensors import BadCheckpoint, check_checkpoint
from art_server.store.archive import Description, describe_step, read_tar, write_tar
from art_server.store.base_models import TINY_DIR, BaseModel
from art_server.store.model_folder import (
    ADAPTER_FILE,
    CONFIG_FILE,
    CONTENT_FILES,
    DESCRIPTION_FILE,
    OPTIMIZER_FILE,
    copy_content,
)
from tests.quick.models.house import TINY_LORA, add_model

MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def checkpoint(tiny_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Description]:
    """A checkpoint's folder and its description."""
    folder = add_model(tmp_path_factory.mktemp("path"), tiny_adapter, steps=2)
    return folder.checkpoint_dir(1), describe_step(folder, folder.read(), 1)


@pytest.fixture(scope="module")
def whole(checkpoint: tuple[Path, Description]) -> bytes:
    return tar_of(*checkpoint)


def tar_of(content: Path, description: Description) -> bytes:
    buffer = io.BytesIO()
    write_tar(content, description, buffer)
    return buffer.getvalue()


def taken_in(data: bytes, folder: Path) -> Description:
    """A fresh folder each time: a property test has one `tmp_path` for all its examples."""
    target = folder / str(len(list(folder.iterdir())))
    return read_tar(io.BytesIO(data), target)


def test_a_tar_is_the_same_each_time_and_is_read_back(
    checkpoint: tuple[Path, Description], whole: bytes, tmp_path: Path
) -> None:
    assert tar_of(*checkpoint) == whole
    with tarfile.open(fileobj=io.BytesIO(whole)) as theirs:
        assert theirs.getnames() == [DESCRIPTION_FILE, *sorted(CONTENT_FILES)]
    description = taken_in(whole, tmp_path)
    assert description == checkpoint[1] and description.lora == TINY_LORA
    for name in CONTENT_FILES:
        assert (tmp_path / "0" / name).read_bytes() == (checkpoint[0] / name).read_bytes()


def test_a_checkpoint_without_its_optimizer_is_complete(tiny_adapter: Path, tmp_path: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=2)
    (folder.checkpoint_dir(1) / OPTIMIZER_FILE).unlink()
    data = tar_of(folder.checkpoint_dir(1), describe_step(folder, folder.read(), 1))
    assert OPTIMIZER_FILE not in taken_in(data, tmp_path).files


def test_a_file_that_was_deleted_meanwhile_is_named(tiny_adapter: Path, tmp_path: Path) -> None:
    folder = add_model(tmp_path, tiny_adapter, steps=2)
    description = describe_step(folder, folder.read(), 1)
    folder.remove_steps([1])
    with pytest.raises(NotFound) as error:
        tar_of(folder.checkpoint_dir(1), description)
    assert error.value.code == "unknown_step"


MEMBERS = st.sampled_from([DESCRIPTION_FILE, *CONTENT_FILES])
NAMES = MEMBERS | st.sampled_from(
    ["../x", "/etc/passwd", "a/b", "", ".", "..", "adapter_model.bin", "x" * 300, "é.json"]
)
KINDS = st.sampled_from(
    [tarfile.REGTYPE] * 6
    + [tarfile.AREGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]
    + [tarfile.CHRTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE]
)


@MANY
@given(members=st.lists(st.tuples(NAMES, KINDS, st.binary(max_size=40)), max_size=6))
def test_no_member_leaves_the_folder_whatever_it_is_called(
    members: list[tuple[str, bytes, bytes]], checkpoint: tuple[Path, Description], tmp_path: Path
) -> None:
    """Behind a good description come members of any name and kind."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        add(tar, DESCRIPTION_FILE, checkpoint[1].model_dump_json().encode())
        for name, kind, content in members:
            add(tar, name, content, kind)
    number = len(list(tmp_path.iterdir()))
    with pytest.raises(InvalidInput) as error:
        taken_in(buffer.getvalue(), tmp_path)
    assert error.value.code in ("bad_tar", "broken_checkpoint") and len(error.value.message) < 400
    folder = tmp_path / str(number)
    assert {entry.name for entry in folder.iterdir()} <= {DESCRIPTION_FILE, *CONTENT_FILES}
    assert all(entry.is_file() and not entry.is_symlink() for entry in folder.iterdir())
    assert len(list(tmp_path.iterdir())) == number + 1


def add(tar: tarfile.TarFile, name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
    tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (tarfile.XHDTYPE, 2**32),
        (tarfile.XGLTYPE, 2**32),
        (tarfile.GNUTYPE_LONGNAME, 2**32),
        (tarfile.GNUTYPE_SPARSE, 2**32),
        (tarfile.XHDTYPE, -512),
        (tarfile.REGTYPE, -512),
        (tarfile.REGTYPE, 2**60),
    ],
)
def test_a_header_with_a_hostile_length_is_refused(kind: bytes, size: int, whole: bytes, tmp_path: Path) -> None:
    """`tarfile` alone would read an extended header into memory, or the same negative one for ever."""
    header = tarfile.TarInfo(ADAPTER_FILE)
    header.type, header.size = kind, size
    for start in (b"", whole[: whole.index(b"adapter_config.json\0")]):
        with pytest.raises(InvalidInput) as error:
            taken_in(start + header.tobuf(tarfile.GNU_FORMAT) + whole, tmp_path)
        assert error.value.code == "bad_tar"


def test_received_files_are_private(whole: bytes, tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        taken_in(whole, tmp_path)
    finally:
        os.umask(mask)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "0").iterdir()} == {0o600}


@MANY
@given(cut=st.integers(0, 2**20), offset=st.integers(0, 2**20), bit=st.integers(0, 7))
def test_a_tar_that_was_cut_or_changed_is_refused_or_the_same(
    cut: int, offset: int, bit: int, whole: bytes, checkpoint: tuple[Path, Description], tmp_path: Path
) -> None:
    data = bytearray(whole)
    data[offset % len(data)] ^= 1 << bit
    for spoilt in (bytes(data), whole[: cut % len(whole)]):
        try:
            description = taken_in(spoilt, tmp_path)
        except InvalidInput:
            continue
        # A bit of padding, of an unused field of a header, of the job's metrics.
        assert description.files == checkpoint[1].files


@MANY
@given(data=st.binary(max_size=2000))
def test_no_bytes_make_a_tar_by_chance(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        taken_in(data, tmp_path)


# --- adapters -----------------------------------------------------------------------------------------------------


def adapter(tmp_path: Path, source: Path, **changes: Any) -> Path:
    """The adapter with other values in its configuration."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    copy_content(source, folder)
    config = json.loads((folder / CONFIG_FILE).read_text()) | changes
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def test_an_adapter_tells_its_shape_and_base(tmp_path: Path, tiny_adapter: Path) -> None:
    lora, base = read_lora(adapter(tmp_path, tiny_adapter, base_model_name_or_path="org/base"))
    assert (lora, base) == (TINY_LORA, "org/base")
    assert read_lora(adapter(tmp_path, tiny_adapter, base_model_name_or_path=1))[1] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("task_type", "SEQ_CLS"),
        ("r", True),
        ("r", 513),
        ("lora_alpha", -1),
        ("bias", "all"),
        ("use_dora", True),
        ("use_rslora", "yes"),
        ("lora_alpha", 1e6),
        ("exclude_modules", 3),
        ("layers_to_transform", ["0"]),
        ("target_modules", "(q_proj"),
        ("target_modules", r".*\.q_proj"),  # PEFT would ignore the tensors of v_proj
        ("exclude_modules", "x" * 100_000),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 2}),
        ("a_later_kind", 1),
        ("init_lora_weights", "pissa_niter_4"),
        ("target_modules", [1]),
        ("target_modules", {}),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_its_field(
    field: str, value: object, tmp_path: Path, tiny_adapter: Path
) -> None:
    with pytest.raises(InvalidInput) as error:
        read_lora(adapter(tmp_path, tiny_adapter, **{field: value}))
    assert error.value.code == "bad_adapter" and field in error.value.message


def test_the_default_configuration_of_peft_is_a_plain_lora(tmp_path: Path, tiny_adapter: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    folder = adapter(tmp_path, tiny_adapter)
    config.save_pretrained(str(folder))
    assert read_lora(folder)[0].rank == 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    (
        *("peft_type", "task_type", "r", "lora_alpha", "bias", "target_modules", "unknown"),
        *("init_lora_weights", "use_dora", "rank_pattern", "base_model_name_or_path"),
    )
)


@MANY
@given(changes=st.dictionaries(FIELDS, JSON, max_size=4))
def test_any_configuration_is_read_or_refused(changes: dict[str, Any], tmp_path: Path, tiny_adapter: Path) -> None:
    try:
        lora, base = read_lora(adapter(tmp_path, tiny_adapter, **changes))
    except InvalidInput as error:
        assert error.code == "bad_adapter" and len(error.message) < 400
    else:
        assert lora.rank == 4 and lora.alpha > 0 and (base is None or isinstance(base, str))


@MANY
@given(data=st.binary(max_size=200) | st.just(b"[" * 100_000) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_configuration_file_is_refused_in_words(data: bytes, tmp_path: Path, tiny_adapter: Path) -> None:
    folder = adapter(tmp_path, tiny_adapter)
    (folder / CONFIG_FILE).write_bytes(data)
    with pytest.raises(InvalidInput):
        read_lora(folder)


def tiny_layers() -> Layers:
    return BaseModel("art/tiny", TINY_DIR).facts.layers


def tensors_file(header: Any, size: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


def tensor(shape: list[int], start: int, kind: str = "F32", width: int = 4) -> dict[str, Any]:
    size = width
    for length in shape:
        size *= length
    return {"dtype": kind, "shape": shape, "data_offsets": [start, start + size]}


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x95pickle",
        struct.pack("<Q", 2**62) + b"{}",
        tensors_file({A: tensor([4, 2], 0)}, 8),
        tensors_file({A: tensor([4, 2], 0), B: tensor([2, 4], 0)}, 32),
        tensors_file({}, 0),
        tensors_file({A: tensor([4, 2], 0)}, 32),
        tensors_file({A: tensor([4, 2], 0, "I32")}, 32),
        tensors_file({A: tensor([4, 2], 0, "F8_E4M3", 1)}, 8),
        tensors_file({"x" * 10**5: tensor([4, 2], 0)}, 32),
    ],
)
def test_what_is_no_adapter_s_weights_is_refused(data: bytes, tmp_path: Path, tiny_adapter: Path) -> None:
    folder = adapter(tmp_path, tiny_adapter)
    (folder / ADAPTER_FILE).write_bytes(data)
    with pytest.raises(BadCheckpoint) as error:
        check_checkpoint(tiny_layers(), TINY_LORA, folder)
    assert len(str(error.value)) < 1000


def test_weights_of_another_number_type_are_refused(tmp_path: Path, tiny_adapter: Path) -> None:
    folder = adapter(tmp_path, tiny_adapter)
    for kind in (torch.int32, torch.float64, torch.float8_e4m3fn):
        tensors = load_file(tiny_adapter / ADAPTER_FILE)
        save_file({name: weights.to(kind) for name, weights in tensors.items()}, folder / ADAPTER_FILE)
        with pytest.raises(BadCheckpoint, match="number type"):
            check_checkpoint(tiny_layers(), TINY_LORA, folder)
