"""Commands, links and numbers of the how-to pages are those of the code. Nothing that needs a server runs here; the
commands that need one run in `tests/engine/integration`."""

import functools
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from art import openai_client
from art.unknown_fields import OTHER_NAMES
from art_protocol.wire import LoRAConfig, TrainConfig
from art_server import flags
from art_server.machines.host import parse as parse_host
from art_server.settings import ServerConfig
from art_server.shared.same_policy import mismatch_limits
from art_watch.terminal.cli import make_parser
from tests.pages import HOWTO, NOT_RUN, PAGES, ROOT, blocks, commands

PROGRAMS = {
    *("art", "art-server", "curl", "docker", "hf", "openssl", "pip", "python", "ssh", "uv", "vllm"),
    *("caddy", "xcaddy", "scripts/replay.py"),
}
"""All that the pages call. `vllm` and `python` are in `tests/long/docs`; `openssl` and `ssh` are not ours."""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


UV = shutil.which("uv") or str(ROOT / ".build" / "uv" / "bin" / "uv")


OF_UV = {"--torch-backend", "--no-config"}
"""Its flags in the text of install.md."""


LINK = re.compile(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)")


ROUTE = re.compile(r"^\| (GET|POST|PUT|DELETE) \| `([^`]+)` \|", re.MULTILINE)


def calls(program: str) -> list[list[str]]:
    return [words for page in PAGES for words in commands(page, program)]


def text_of(page: str) -> str:
    return (HOWTO / page).read_text()


def rows(page: str) -> list[list[str]]:
    """The cells of the page's tables."""
    lines = (line for line in text_of(page).splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_program_is_checked() -> None:
    shell_blocks = [text for page in PAGES for text in blocks(page, "bash")]
    lines = "".join(text for text in shell_blocks if not text.startswith(NOT_RUN)).splitlines()
    named = {re.sub(r"^([A-Z_]+=\S* )+", "", line).split()[0] for line in lines if line.strip()}
    assert named <= PROGRAMS


def test_art_has_the_commands() -> None:
    parser = make_parser()
    namespaces = [parser.parse_args(words) for words in calls("art")]
    assert {namespace.command for namespace in namespaces} == {"eval", "export", "finetune", "jobs", "sft", "show"}


def test_art_server_has_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = blocks("share-a-server.md", "text")[0] + blocks("hosts.md", "text")[0]
    (tmp_path / "keys.txt").write_text(keys)
    monkeypatch.chdir(tmp_path)
    configs = [flags.parse(words) for words in calls("art-server") if words[0] != "host"]
    assert len(configs) == 8
    assert [parse_host(words[1:]).ranks for words in calls("art-server") if words[0] == "host"] == [1]
    shared, *_ = (config for config in configs if config.api_key_file is not None)
    assert [key.name for key in shared.api_keys[:3]] == ["alice", "bob", "agents"]
    assert shared.api_keys[2].scopes == {"infer"} and shared.api_keys[2].expires is not None


@pytest.mark.parametrize("page", PAGES)
def test_flags_in_the_text_exist(page: str) -> None:
    named = set(re.findall(r"(?:art-server |`)(--[a-z][a-z-]+)", text_of(page)))
    known = {f"--{flags.flag_of(name).name}" for name in ServerConfig.model_fields}
    words = [word for call in calls("art") for word in call]
    of_art = {word for word in words if word.startswith("--")}
    sft = make_parser().parse_args(["sft", "FILE", "--model", "p/a", "--base-model", "art/tiny"])
    of_art |= {f"--{name.replace('_', '-')}" for name in vars(sft)}
    of_host = {f"--{name.replace('_', '-')}" for name in vars(parse_host(["--join", "URL", "--token-file", "FILE"]))}
    assert named <= known | of_art | of_host | {"--max-lora-rank", "--url", "--path"} | OF_UV


def test_the_fields_in_tables_of_names_are_those_of_the_code() -> None:
    classes = {"TrainConfig": TrainConfig, "LoRAConfig": LoRAConfig}
    for cells in rows("from-others.md"):
        for name, arguments in re.findall(r"`(?:art\.)?(TrainConfig|LoRAConfig)\(([^`]*)\)`", cells[-1]):
            fields = dict(re.findall(r"(\w+)(?:=(?:\"(\w+)\"|\.\.\.))?(?:, |$)", arguments))
            assert fields and fields.keys() <= classes[name].model_fields.keys(), arguments
            if all(fields.values()):
                classes[name].model_validate(fields)


def test_the_tables_of_names_say_what_the_refusals_say() -> None:
    known: list[tuple[list[str], str]] = []
    for cells in rows("from-others.md"):
        if cells[-1].startswith(("none", "the default")):
            continue
        names = re.findall(r"`(?:[\w.]+\.)?(\w+)(?:=[\w\"]+)?`", cells[0])
        known += [(cells, name) for name in names if name in OTHER_NAMES]
    assert len(known) > 40
    for cells, name in known:
        ours = re.findall(r"`(\w+)`", OTHER_NAMES[name]) if OTHER_NAMES[name].startswith("`") else []
        fields = set(ours) & TrainConfig.model_fields.keys()
        assert not fields or fields & set(re.findall(r"\w+", cells[-1])), (name, cells[-1])


def test_curl_calls_routes() -> None:
    routes = [
        (method, re.sub(r"\{[^}]+\}", "[^/]+", path))
        for method, path in ROUTE.findall((ROOT / "docs" / "routes.md").read_text())
    ]
    assert calls("curl")
    for words in calls("curl"):
        method = words[words.index("-X") + 1] if "-X" in words else "GET"
        (url,) = (word for word in words if word.startswith("http://"))
        path = "/" + url.split("/", 3)[3]
        assert any(m == method and re.fullmatch(p, path) for m, p in routes), (method, path)


@functools.cache
def help_of(*command: str) -> str:
    return subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout


def test_pip_uv_and_hf_have_the_flags() -> None:
    python = Path(sys.base_prefix) / "bin" / "python3"
    programs = {
        "pip": ([str(python), "-m", "pip"], 1),
        "uv": ([UV], 2),
        "hf": ([str(Path(sys.prefix) / "bin" / "hf")], 1),
    }
    for program, (command, num_verbs) in programs.items():
        is_there = shutil.which(command[0]) is not None
        if program == "pip" and subprocess.run([*command, "--version"], check=False).returncode:
            is_there = False
        for words in calls(program) if is_there else ():
            used = {word for word in words if word.startswith("--")}
            assert used <= set(re.findall(r"--[a-z-]+", help_of(*command, *words[:num_verbs]))), words


def test_compose_has_the_profile() -> None:
    for words in calls("docker"):
        file, profile = words[words.index("-f") + 1], words[words.index("--profile") + 1]
        services = yaml.safe_load((ROOT / file).read_text())["services"]
        assert any(profile in service.get("profiles", ()) for service in services.values())


@pytest.mark.parametrize("page", PAGES)
def test_extras_and_links_exist(page: str) -> None:
    extras = set(re.findall(r"agent-reinforcement-trainer\[(\w+)\]", text_of(page)))
    assert extras <= PROJECT["optional-dependencies"].keys()
    for target, anchor in LINK.findall(text_of(page)):
        file = (HOWTO / target).resolve() if target else HOWTO / page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}#{anchor}"


def test_the_index_has_every_page() -> None:
    linked = {target for target, _ in LINK.findall(text_of("index.md"))}
    assert set(PAGES) - {"index.md"} <= linked
    nav = (ROOT / "mkdocs.yml").read_text()
    assert all(f"howto/{page}" in nav for page in PAGES)


def test_the_limits_of_the_gap_are_those_of_the_code() -> None:
    types = {"float32", "float16", "bfloat16"}
    documented = {(row[0], row[1]): row[3:] for row in rows("gap.md") if row[0] in types}
    assert len(documented) == 4
    for pair, (high, wrong) in documented.items():
        limits = mismatch_limits(pair)
        assert limits is not None and (float(high), float(wrong)) == (limits.high, limits.wrong), pair
    (exact,) = (row[3:] for row in rows("gap.md") if row[0] == "`--exact`")
    limits = mismatch_limits(("float32", "float32"), is_exact=True)
    assert limits is not None and limits.largest is not None
    wrong, largest = re.findall(r"\de-\d", exact[1])
    assert (float(exact[0]), float(wrong), float(largest)) == pytest.approx((limits.high, limits.wrong, limits.largest))


def test_the_timeouts_are_those_of_the_code() -> None:
    minutes = {row[0]: row[1] for row in rows("rate-limits-and-failures.md") if len(row) == 3}
    (request,) = (value for name, value in minutes.items() if name == "a request to a model")
    assert request.startswith(f"{openai_client.READ_TIMEOUT_SECONDS // 60} minutes")
    (waits,) = (value for name, value in minutes.items() if name.endswith("waits on the server"))
    assert waits.startswith(f"{ServerConfig().wait_limit_seconds // 60:.0f} minutes")
    assert openai_client.MAX_RETRIES == 10, "up to ten times"


def test_the_pythons_are_those_of_the_package() -> None:
    assert PROJECT["requires-python"] == ">=3.11,<3.15"
    (python,) = (row for row in rows("platforms.md") if row[0] == "Python")
    assert set(python[1:]) == {"3.11 to 3.14; the server 3.11 to 3.13"}


INSTALL = re.compile(r"pip install [^`|\n]*")


def test_pages_install_from_a_clone() -> None:
    """The package is on no index: a name instead of a path would install nothing, or another's package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    lines = [line for page in pages for line in INSTALL.findall(page.read_text()) if "--no-index" not in line]
    assert len(lines) > 20
    extras = PROJECT["optional-dependencies"].keys() | {""}
    for line in lines:
        assert PROJECT["name"] not in line, line
        for names in re.findall(r"\.\[([a-z0-9,]*)\]", line):
            assert set(names.split(",")) <= extras, line
