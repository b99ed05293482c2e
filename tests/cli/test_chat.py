"""`mlxpaged chat` without its terminal: the loop, its commands, the file of a saved chat, the reader's keys."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlxpaged.cli.chat import slash
from mlxpaged.cli.chat.chat import Chat
from mlxpaged.cli.chat.conversation import EFFORTS, Conversation
from mlxpaged.cli.chat.loop import talk, uninterrupted
from mlxpaged.cli.chat.reader import Reader, SlashCompleter
from mlxpaged.cli.client import Client
from mlxpaged.models.files.generation_config import LIMITS
from tests.api.helpers import StepGate
from tests.cli.helpers import Result
from tests.cli.screen import shown
from tests.scripted import scripted_server
from tests.support import RunningServer, wait_until

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC")
"""One red pixel."""

SCRIPT = {
    "Why?": "<think>\nHm, why.\n</think>\n\nBecause *so*.",
    "Hello": "Hi.",
    "And then?": "Then \x1b[2Jthis.",
    "Long?": "so " * 2000,
    "Be rude.": "No.",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", SCRIPT) as server:
        yield server


class Session:
    """A chat in which the user types what the test says. In place of a text, a function can do something."""

    def __init__(self, server: RunningServer) -> None:
        self.out = io.StringIO()
        self.conversation = Conversation("scripted")
        self.chat = Chat(Client(server.url), self.conversation, self.out, shows_stats=False)

    def type(self, *texts: str | BaseException) -> str:
        """What the terminal shows of it."""
        before, todo = len(self.out.getvalue()), list(texts)

        def read() -> str:
            if not todo:
                raise EOFError
            text = todo.pop(0)
            if isinstance(text, BaseException):
                raise text
            return text

        with uninterrupted():
            talk(self.chat, read)
        return shown(self.out.getvalue()[before:])


@pytest.fixture
def session(server: RunningServer) -> Session:
    return Session(server)


def test_each_answer_sees_the_conversation(session: Session) -> None:
    assert session.type("Hello", "And then?").split("\n")[:2] == ["Hi.", "Then [2Jthis."]
    assert session.conversation.messages == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Then \x1b[2Jthis."},
    ]


def test_thinking_is_folded_and_can_be_unfolded(session: Session) -> None:
    found = session.type("Why?")
    assert re.match(r"thought for \d+ s, /think shows it\nBecause ", found)
    assert "Hm" not in found
    assert session.conversation.messages[1]["content"] == "Because *so*."
    assert session.type("/think") == "Hm, why.\n"


def test_ctrl_c_ends_the_answer_on_the_server_too_and_not_the_chat(session: Session, server: RunningServer) -> None:
    def interrupt() -> None:
        wait_until(lambda: "so so" in session.out.getvalue())
        for _ in range(3):  # the user is impatient
            os.kill(os.getpid(), signal.SIGINT)
        gate.open()

    with StepGate(server) as gate:
        gate.allow(200)  # far from all
        thread = threading.Thread(target=interrupt)
        thread.start()
        found = session.type("Long?", KeyboardInterrupt(), "Hello")
        thread.join()
    assert "Traceback" not in found
    assert found.endswith("\nCtrl-D or /bye leaves the chat.\nHi.\n")
    server.wait_idle()
    answer = session.conversation.messages[1]["content"]
    assert 0 < len(answer) < len(SCRIPT["Long?"])
    assert SCRIPT["Long?"].startswith(answer), "what came is a part of the conversation"


def test_a_question_without_an_answer_is_taken_back(session: Session) -> None:
    assert "context length" in session.type("x " * 9000)
    assert session.conversation.messages == []
    session.conversation.settings["temperature"] = 9  # as a saved chat may have it
    assert "temperature" in session.type("Hello")
    assert session.conversation.messages == []
    assert "Hi." in session.type("/set temperature default", "Hello")


def test_the_speed_is_shown_on_request(session: Session) -> None:
    assert session.type("/stats") == "There is no answer yet.\n"
    speed = session.type("Hello", "/stats").splitlines()[1]
    assert re.match(r"first token after \d+\.\d", speed)
    assert " tokens, " in speed
    assert "tokens/s; prompt of " in speed
    assert session.type("/stats on", "Hello").count("first token after") == 1
    assert session.type("/stats off", "Hello").count("first token after") == 0


def test_commands_change_what_is_sent(session: Session) -> None:
    settings = ("temperature 0.5", "top_k 3", "stop now", "enable_thinking off")
    session.type("/system Be rude.", *(f"/set {setting}" for setting in settings))
    assert session.conversation.request() == {
        "model": "scripted",
        "messages": [{"role": "system", "content": "Be rude."}],
        "temperature": 0.5,
        "top_k": 3,
        "stop": "now",
        "enable_thinking": False,
    }
    assert "temperature: 0.5\n" in session.type("/set")
    session.type("/system none", "Hello", "/clear")
    assert session.conversation.request()["messages"] == []


def test_a_model_that_does_not_see_is_shown_no_image(session: Session, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    said = session.type(f"/image {tmp_path}/a.png")
    assert said == "scripted does not see images; no model of the server does\n"
    assert session.conversation.images == []


def test_an_image_goes_with_the_next_message(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted model sees nothing, so it refuses the message: it is taken back, and the image is kept."""
    monkeypatch.setattr(slash, "sees", lambda entry: True)
    file = tmp_path / "a b.png"
    file.write_bytes(PNG)
    assert session.type(f"/image {file}") == "images that go with your next message: 1\n"
    assert "image" in session.type("Hello")
    assert session.conversation.messages == []
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert session.conversation.images == [url]
    session.conversation.ask("Hello")
    part = {"type": "image_url", "image_url": {"url": url}}
    assert session.conversation.messages == [{"role": "user", "content": [part, {"type": "text", "text": "Hello"}]}]
    session.conversation.answer("Hi.")
    session.type(f"/save {tmp_path}/chat.json", "/clear")
    assert session.type("/image") == "images that go with your next message: 0\n"
    session.type(f"/load {tmp_path}/chat.json")
    assert session.conversation.last_question() == "Hello"
    assert session.conversation.images == [url]
    assert session.type("/image none") == "images that go with your next message: 0\n"


def test_what_is_no_image_is_not_sent(session: Session, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    os.mkfifo(tmp_path / "fifo.png")
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(2**25)
    for name, said in (
        ("text.png", "is no PNG, JPEG, WEBP or GIF"),
        ("fifo.png", "is not a file"),
        ("large.png", "has more than 20 MiB"),
        ("none.png", "No such file"),
    ):
        assert said in session.type(f"/image {tmp_path}/{name}")
    assert session.conversation.images == []


def test_a_question_is_asked_again(session: Session) -> None:
    assert session.type("/retry") == "there is no question to ask again\n"
    session.type("Hello", "And then?", "/retry")
    assert [message["content"] for message in session.conversation.messages][::2] == ["Hello", "And then?"]


def test_an_answer_stays_if_the_question_cannot_be_asked_again(session: Session, server: RunningServer) -> None:
    session.type("Hello", "And then?")
    before = list(session.conversation.messages)
    session.chat.client = Client("http://127.0.0.1:1")
    assert session.type("/retry") == "no server runs at http://127.0.0.1:1\n"
    assert session.conversation.messages == before
    session.chat.client = Client(server.url)
    session.type("/retry")
    assert session.conversation.messages == before


def test_a_command_and_its_argument_can_be_on_two_lines(session: Session) -> None:
    assert session.type("/system\nBe kind.\nBe brief.") == "system message: Be kind.\nBe brief.\n"


def test_a_chat_is_saved_and_goes_on_another_day(session: Session, server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    assert session.type("/system Be kind.", "Hello", f"/save {path}").endswith(f"saved in {path}\n")
    session.type(f"/save {path}")
    other = Session(server)
    assert other.type(f"/load {path}") == f"loaded 1 questions and answers from {path}\n"
    assert other.conversation == session.conversation


@pytest.mark.parametrize(
    "content",
    [
        *("no JSON", "[]", "{}", "[" * 1_000_000, '{"model":' * 1_000_000, "NaN", "\0", '{"model": "m", "x": 1}'),
        '{"model": 1, "messages": [{"role": "user", "content": "x"}]}',
        '{"model": "m", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": null}]}',
        '{"model": "m", "settings": {"model": "other"}}',
        *('{"model": "m", "settings": 3}', '{"model": "m", "settings": []}', '{"model": "m", "messages": {}}'),
        '{"model": "m", "images": "x"}',
    ],
    ids=lambda content: content[:40],
)
def test_a_file_that_is_no_chat_is_neither_loaded_nor_overwritten(
    session: Session, tmp_path: Path, content: str
) -> None:
    (path := tmp_path / "file").write_text(content)
    for command in ("load", "save"):
        assert session.type(f"/{command} {path}") == f"{path} is not a saved chat\n"
    assert path.read_text() == content


def test_what_cannot_be_read_as_a_whole_is_no_chat(session: Session, tmp_path: Path) -> None:
    """A FIFO would wait for a writer, and a device or a terabyte take all memory."""
    os.mkfifo(fifo := tmp_path / "fifo")
    (device := tmp_path / "device").symlink_to("/dev/zero")
    with (large := tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    for path in (fifo, device, large, tmp_path):
        for command in ("load", "save"):
            assert session.type(f"/{command} {path}") == f"{path} is not a saved chat\n"
    assert large.stat().st_size == 2**40


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/modle", "unknown command /modle: /model?"),
        ("/xyzzy", "unknown command /xyzzy: /help lists the commands"),
        ("/set tempo 1", "unknown setting tempo: there are temperature, "),
        ("/set temperature hot", "temperature must be a number from 0 to 2, got 'hot'"),
        ("/set temperature 9", "temperature must be a number from 0 to 2, got '9'"),
        ("/set temperature nan", "temperature must be a number from 0 to 2, got 'nan'"),
        ("/set top_p 0", "top_p must be a number above 0 to 1, got '0'"),
        ("/set top_k 1.5", "top_k must be a whole number from -1 to 2.14748e+09, got '1.5'"),
        ("/set max_tokens 0", "max_tokens must be a whole number from 1 to "),
        ("/set seed -1", "seed must be a whole number from 0 to "),
        ("/set reasoning_effort much", "reasoning_effort must be one of none, minimal, low, "),
        ("/set enable_thinking maybe", "enable_thinking must be on or off, got 'maybe'"),
        ("/stats maybe", "/stats, /stats on or /stats off"),
        ("/save", "/save FILE"),
        ("/load /no/such/file", "No such file"),
        ("/load ~nobody-here/file", "there is no such home directory: ~nobody-here/file"),
        ("/model other", "does not serve other. It serves scripted."),
        ("/model", "* scripted  loaded"),
        ("/model scripted", "model: scripted"),
    ],
)
def test_a_command_says_what_it_did_or_why_not(session: Session, text: str, said: str) -> None:
    assert said in session.type(text)


def test_every_command_is_in_the_help_and_bye_leaves(session: Session) -> None:
    found = session.type("/help", "/bye", "Hello")
    assert "/set [NAME [VALUE]]  show or change a setting" in found
    assert "Hi." not in found


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit"])
def test_the_words_of_other_chats_leave_too(session: Session, word: str) -> None:
    assert session.type(word, "Hello") == ""
    assert session.conversation.messages == []


@pytest.mark.parametrize(
    "setting",
    [
        *(
            f"{name} {value:.0f}"
            for name, limits in LIMITS.items()
            for value in (limits.least + limits.excluded, limits.most)
        ),
        *("seed 0", "seed 4294967295", "max_tokens 1", "thinking_budget 1", "thinking_budget 2147483647"),
        *(f"reasoning_effort {effort}" for effort in EFFORTS),
    ],
)
def test_the_server_takes_what_set_takes(session: Session, setting: str) -> None:
    found = session.type(f"/set {setting}", "/set enable_thinking default")
    assert "must be" not in found
    answer = session.type("Hello")
    assert "must be" not in answer
    assert "should be" not in answer
    assert len(session.conversation.messages) == 2, answer


def test_a_message_may_begin_with_a_path(session: Session) -> None:
    session.type("/usr/bin: Hello")
    assert len(session.conversation.messages) == 2


def test_a_server_that_is_gone_does_not_end_the_chat(session: Session) -> None:
    session.chat.client = Client("http://127.0.0.1:1")
    assert session.type("Hello", "/model") == 2 * "no server runs at http://127.0.0.1:1\n"
    assert session.conversation.messages == []


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("one\r", "one"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\ntwo\r", "one\ntwo"),
        ('"""one\rtwo"""\r', "one\ntwo"),
        ('"""Docs."""\nimport os\r', '"""Docs."""\nimport os'),
        ("\x1b[200~pasted\nlines\x1b[201~\r", "pasted\nlines"),
        ("\x1b[A\r", "the message before"),
    ],
)
def test_a_message_can_have_lines_and_come_from_the_history(tmp_path: Path, keys: str, text: str) -> None:
    history = tmp_path / "new" / "history"
    for typed, expected in (("the message before\r", "the message before"), (keys, text)):
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text(typed)
            assert Reader(history, lambda command: ()).read() == expected
        assert stat.S_IMODE(history.stat().st_mode) == 0o600
        history.chmod(0o644)  # as an earlier version, or the user, may have left it


def test_a_message_is_read_although_the_history_is_gone_or_cannot_be_written(tmp_path: Path) -> None:
    history = tmp_path / "new" / "history"
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        reader = Reader(history, lambda command: ())
        history.unlink()
        history.parent.rmdir()
        pipe.send_text("one\r")
        assert reader.read() == "one"
        assert stat.S_IMODE(history.stat().st_mode) == 0o600
        history.unlink()
        history.mkdir()
        pipe.send_text("two\r")
        assert reader.read() == "two"


@pytest.mark.parametrize(("keys", "error"), [("\x04", EOFError), ("half\x03", KeyboardInterrupt)])
def test_ctrl_d_and_ctrl_c_at_the_prompt(tmp_path: Path, keys: str, error: type[BaseException]) -> None:
    (no_directory := tmp_path / "file").touch()
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        with pytest.raises(error):
            Reader(no_directory / "history", lambda command: ()).read()


def completions(chat: Chat, text: str) -> list[str]:
    found = SlashCompleter(chat.words).get_completions(Document(text), CompleteEvent())
    return [completion.text for completion in found]


def test_commands_settings_models_and_files_are_completed(session: Session, tmp_path: Path) -> None:
    (tmp_path / "saved.json").touch()
    assert completions(session.chat, "/s") == ["/system", "/set", "/stats", "/save"]
    assert completions(session.chat, "/set top") == ["top_p", "top_k"]
    assert completions(session.chat, "/model ") == ["scripted"]
    assert completions(session.chat, f"/load {tmp_path}/sa") == ["ved.json"]
    assert completions(session.chat, "a message") == []


def test_chat_needs_a_terminal(run: Callable[..., Result]) -> None:
    result = run("chat")
    assert result == Result(1, "", "mlxpaged: chat needs a terminal; for one answer, use `mlxpaged run`\n")
