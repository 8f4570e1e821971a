"""The command line: errors become sentences and exit codes, and --help imports nothing heavy."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvlearn import __version__, cli
from kvlearn.errors import KvlearnError

HEAVY = ("datasets", "huggingface_hub", "jinja2", "lightning", "matplotlib", "numpy", "scipy", "torch", "transformers")


@pytest.fixture
def failing() -> Iterator[Callable[[Any], None]]:
    """A command named ``fail`` that raises, or calls, what it is given."""
    registered = list(cli.app.registered_commands)

    def add(trouble: Any) -> None:
        def fail(count: int = 1) -> None:
            if isinstance(trouble, BaseException):
                raise trouble
            trouble()

        cli.app.command("fail")(fail)

    yield add
    cli.app.registered_commands[:] = registered


@pytest.mark.parametrize(
    ("trouble", "sentence"),
    [
        (KvlearnError("budget 3 is too small:\n  at least 40 slots are needed."), "budget 3 is too small: at least 40"),
        (OSError(errno.ENOSPC, "No space left on device", "out/rows.jsonl"), "the disk is full while writing out/rows"),
        (RuntimeError("io error: No space left on device (os error 28)"), "the disk is full; free some space"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "there is not enough memory (Default"),
        (RuntimeError("CUDA out of memory. Tried to allocate 20 GiB."), "there is not enough memory (CUDA"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "no permission to use out; choose another place"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "out"), "out: Is a directory"),
        (OSError("nothing found at a/b.\nIs it a model?"), "nothing found at a/b. Is it a model?"),
        (ModuleNotFoundError("No module named 'datasets.x'", name="datasets.x"), "pip install 'kvlearn[trace]'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(failing, capsys, trouble: Exception, sentence: str) -> None:
    failing(trouble)
    assert cli.main(["fail"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvlearn: error: ")
    assert sentence in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fail", "--cuont", "2"], "--count"),
        (["fail", "--count", "many"], "'--count'"),
        (["fail", "extra"], "extra"),
        (["fial"], "Did you mean 'fail'?"),
        (["--verison"], "--version"),
    ],
)
def test_a_typo_is_named_with_a_suggestion(failing, capsys, arguments: list[str], sentence: str) -> None:
    failing(lambda: None)
    assert cli.main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("kvlearn: error: ")
    assert sentence in printed
    assert "--help" in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), typer.Abort()])
def test_an_interruption_is_130(failing, capsys, interruption: BaseException) -> None:
    failing(interruption)
    assert cli.main(["fail"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("bug", [ZeroDivisionError("x"), ModuleNotFoundError("no kvlearn.x", name="kvlearn.x")])
def test_a_bug_keeps_its_traceback(failing, bug: Exception) -> None:
    failing(bug)
    with pytest.raises(type(bug)):
        cli.main(["fail"])


def test_the_environment_can_ask_for_the_traceback_of_a_mistake(failing, monkeypatch) -> None:
    failing(KvlearnError("no such policy."))
    monkeypatch.setenv("KVLEARN_TRACEBACK", "1")
    with pytest.raises(KvlearnError):
        cli.main(["fail"])


def test_a_command_chooses_its_own_exit_code(failing) -> None:
    failing(typer.Exit(1))
    assert cli.main(["fail"]) == 1


def test_success_is_0(failing, capsys) -> None:
    failing(lambda: print("done"))
    assert cli.main(["fail"]) == 0
    assert capsys.readouterr().out == "done\n"


def test_version_names_what_decides_the_numbers(capsys) -> None:
    import torch
    import transformers

    assert cli.main(["--version"]) == 0
    printed = capsys.readouterr().out
    torch_release = torch.__version__.partition("+")[0]  # PyPI's CUDA build does not name its build in its metadata
    for part in (f"kvlearn {__version__}", f"torch {torch_release}", f"transformers {transformers.__version__}"):
        assert part in printed


def test_no_arguments_is_help(capsys) -> None:
    assert cli.main([]) == 0
    without = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert without == capsys.readouterr().out
    assert "corpora" in without


def test_every_extra_named_in_an_error_exists() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for package, extra in cli.EXTRA_OF.items():
        wanted = project["optional-dependencies"][extra]
        assert any(line.startswith(package.replace("_", "-")) for line in wanted), (package, extra)


@pytest.mark.parametrize("command", ["demo", "trace", "generate", "compare", "calibrate", "inspect", "report"])
def test_help_shows_defaults_as_they_are_typed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    assert "default: (" not in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvlearn.cli import main; assert main(['--help']) == 0; "
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]", "these make kvlearn --help slow; import them inside the command's function"


def _python(code: str, **options: Any) -> subprocess.Popen[str]:
    program = "import sys; from kvlearn import cli\n" + code + "\nsys.exit(cli.main(['act']))"
    return subprocess.Popen([sys.executable, "-c", program], text=True, stderr=subprocess.PIPE, **options)


def test_a_reader_that_stops_reading_is_no_error() -> None:
    code = "@cli.app.command('act')\ndef act():\n    for _ in range(100_000): print('line')"
    process = _python(code, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    assert process.stderr
    assert process.stderr.read() == ""
    assert process.wait() == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_under_stdout_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        process = _python("@cli.app.command('act')\ndef act(): print('line')", stdout=full)
    _, printed = process.communicate()
    assert process.returncode == 2
    assert printed == "kvlearn: error: the disk is full; free some space and run the command again\n"


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_is_one_word() -> None:
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it\n"
        "@cli.app.command('act')\ndef act():\n    print('ready', flush=True)\n    signal.pause()"
    )
    process = _python(code, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate()
    assert process.returncode == 130
    assert printed == "interrupted\n"


def test_corpora_lists_what_is_here_and_how_to_get_the_rest(monkeypatch, capsys) -> None:
    from kvlearn import corpora

    found = [
        corpora.CorpusInfo("notes", "prose: some notes", "comes with Python", True),
        corpora.CorpusInfo("poems", "verse: some poems", "pip install poems[all]", False),
    ]
    monkeypatch.setattr(corpora, "list_corpora", lambda: found)
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["corpora"]) == 0
    _, notes, poems = capsys.readouterr().out.splitlines()
    assert notes.split() == ["notes", "prose:", "some", "notes", "yes"]
    assert poems.split() == ["poems", "verse:", "some", "poems", "no:", "pip", "install", "poems[all]"]


def test_a_budget_alone_is_refused_before_anything_is_loaded(capsys) -> None:
    assert cli.main(["generate", "no-such-model", "--budget", "64", "--prompt", "a"]) == 2
    assert "give --scorer or --policy too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "amx", "dtype"), [("cpu", True, "bfloat16"), ("cpu", False, "float32"), ("cuda", False, "bfloat16")]
)
def test_text_is_read_in_the_dtype_that_the_machine_multiplies_fastest(
    monkeypatch: pytest.MonkeyPatch, device: str, amx: bool, dtype: str
) -> None:
    from kvlearn.models import reading_dtype

    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    assert reading_dtype(device) == dtype
