"""The command ``kvlinker run``: joins or starts a server, and reads what the user writes."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.cli.chat.conversation import Conversation
from kvlinker.cli.chat.rendering import show_answer
from kvlinker.cli.chat.starting import start_server
from kvlinker.cli.console import FAILURE, fail, failures, warn
from kvlinker.cli.models import download, is_downloaded
from kvlinker.cli.options import ApiKey, settings_options
from kvlinker.cli.running import joined
from kvlinker.doors.client import Client
from kvlinker.engines.contract.gguf_files import is_of_hub
from kvlinker.engines.contract.model_place import check_model
from kvlinker.linking import parse_policy
from kvlinker.settings import Settings

PROMPT = ">>> "

COMMANDS = """\
/docs FOLDER   answer from the documents in a folder, or in a file; /docs alone ends it
/policy NAME   link their chunks by another policy; `kvlinker policies` lists them
/new           begin a new conversation
/quit          end; so does Ctrl+D
Ctrl+C cancels an answer."""


@settings_options("state_dir")
def run(
    settings: Settings,
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, GGUF file or Hugging Face hub id; by default that of the running server,"
            " or the shipped model.",
            metavar="MODEL",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A running server; by default that which runs here, or a new one."),
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Talk with a model in the terminal.

    Joins the server that runs on the state directory, or starts one, which runs on afterwards until
    `kvlinker stop`. Another MODEL of the hub is downloaded before. /docs FOLDER has the model
    answer from documents, /help lists more.

    Without a terminal, what is read from stdin is one question, after lines of commands, and the
    answer's text is printed.
    """
    if model is not None:
        settings = settings.model_copy(update={"model": model})
    with failures():
        if url is None:
            url, api_key = _server(settings, api_key)
        with Client(url, api_key) as client:
            status = client.server_status()
        conversation = Conversation(url, api_key)
        if sys.stdin.isatty():
            window, policy = f"{status['max_model_len']:,} tokens", status["policy"]
            _say(f"{status['model']} at {url}: {window}, policy {policy}. /help lists commands.")
            _converse(conversation)
        elif not _answer_input(conversation):
            raise typer.Exit(FAILURE)


def _server(settings: Settings, api_key: str | None) -> tuple[str, str | None]:
    """Return the address of the server that runs, or of a new one, and a key of it."""
    key = api_key or next(iter(settings.accepted_keys), None)
    with joined(settings, key) as found:
        if found is not None:
            return found[0].url, key
    if is_of_hub(settings.model) and not is_downloaded(settings.model):
        download(settings.model)  # by which alone it is known whether there is such a file
    check_model(settings)
    if not is_downloaded(settings.model):
        download(settings.model)
    server = start_server(settings)
    _say(f"The server {server.pid} runs on after this; `kvlinker stop` ends it.")
    return server.url, key


def _converse(conversation: Conversation) -> None:
    """Answer line by line until the user ends it."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() edits lines, and keeps those before, by it
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line in ("/quit", "/exit", "/bye"):
            return
        try:
            if line.startswith("/"):
                _command(conversation, line)
            elif line:
                _answer(conversation, line)
        except KVLinkerError as error:
            typer.echo(f"kvlinker: {error.message}", err=True)
        except KeyboardInterrupt:
            _say("cancelled")


def _answer_input(conversation: Conversation) -> bool:
    """Answer what is read from stdin as one question, which commands may precede. Returns whether
    there was one."""
    lines = iter(sys.stdin.read().strip().splitlines())
    question = []
    for line in lines:
        if line.startswith("/"):
            _command(conversation, line.strip())
            continue
        question = [line, *lines]
    if not question:
        raise fail("there is no question to read from stdin", FAILURE)
    _answer(conversation, "\n".join(question))
    return True


def _answer(conversation: Conversation, question: str) -> None:
    show_answer(conversation.ask(question))
    sources = dict.fromkeys(Path(hit.metadata["source"]).name for hit in conversation.read)
    if conversation.figures is not None:
        read = f"; read {', '.join(sources)}" if sources else ""
        _say(f"{conversation.figures}{read}")


def _command(conversation: Conversation, line: str) -> None:
    """Do what a line says that begins with a slash. Raises KVLinkerError."""
    name, _, rest = line.partition(" ")
    match name, rest.strip():
        case "/docs", folder if folder:
            chunks, left_out = conversation.use_documents(Path(folder))
            for each in left_out:
                warn(each)
            _say(f"{chunks:,} chunks of {folder} are cached; questions get those that match best")
        case "/docs", "":
            conversation.leave_documents()
            _say("no documents")
        case "/policy", policy if policy:
            conversation.policy = parse_policy(policy).name
            _say(f"policy {conversation.policy}")
        case "/new", "":
            conversation.clear()
            _say("a new conversation")
        case "/help", _:
            _say(COMMANDS)
        case _:
            raise InvalidRequestError(f"{line!r} is no command here.\n{COMMANDS}")


def _say(text: str) -> None:
    """Write what is no answer: to stderr, dim on a terminal."""
    console = Console(stderr=True, highlight=False)
    console.print(Text(text, style="dim"), soft_wrap=not console.is_terminal)
