"""Makes the requests of coding agents: the fields, kinds and lengths are those that the agents
send; every text is the laboratory's own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

Json = dict[str, Any]

LEAST_CHARACTERS = 8
"""The length below which no text is cut by ``Session.scale``."""

SHORT_RESULT, LONG_RESULT = 200, 1500
"""The characters of a tool's first result, such as those of a list of files, and of the others,
such as files."""


@dataclass(frozen=True)
class Repository:
    """Where an agent works: what its prompts say of the place and of the day."""

    folder: str
    date: str
    branch: str
    changed: Sequence[str]

    @property
    def status(self) -> str:
        """Return what git tells of the files."""
        return "\n".join(f" M {file}" for file in self.changed)


FIRST = Repository("/home/ana/tidal", "Monday, 2 March 2026", "main", ("src/tide.py", "notes.md"))
OTHER = Repository(
    "/srv/work/orchard/backend", "Thursday, 5 March 2026", "pruning", ("orchard/trees.py",)
)


@dataclass(frozen=True)
class Session:
    """How far an agent has come in a repository."""

    repository: Repository = FIRST
    turns: int = 0
    """The calls of tools with results in the history."""
    edited: int | None = None
    """The turn whose result is another one than before; None for no turn."""
    scale: float = 1.0
    """The share of each text's length that is kept."""

    def text(self, name: str, length: int) -> str:
        """Return the text of this name, of about ``length`` characters."""
        return prose(name, max(LEAST_CHARACTERS, round(self.scale * length)))

    def results(self) -> list[tuple[str, str]]:
        """Return the file that each turn reads, and what the tool returns."""
        files = [f"{self.repository.folder}/part_{turn}.py" for turn in range(self.turns)]
        lengths = [SHORT_RESULT, *[LONG_RESULT] * self.turns]
        read = [
            self.text(f"result of {file}", length)
            for file, length in zip(files, lengths, strict=False)
        ]
        if self.edited is not None:
            read[self.edited] = self.text("result of a file that was changed", LONG_RESULT)
        return list(zip(files, read, strict=True))

    def tools(self, table: str) -> list[tuple[str, str, Json]]:
        """Return name, description and parameters of each tool in a table: a line for each, with
        the length of its description, and those of its parameters' behind their names."""
        found = []
        for line in table.strip().splitlines():
            (name, length), *parameters = (
                (word, int(number)) for word, number in (pair.split() for pair in line.split(","))
            )
            properties = {
                parameter: {"type": "string", "description": self.text(f"{name} {parameter}", most)}
                for parameter, most in parameters
            }
            schema = {
                "type": "object",
                "properties": properties,
                "required": list(properties)[:1],
                "additionalProperties": False,
            }
            found.append((name, self.text(f"tool {name}", length), schema))
        return found


class Request(NamedTuple):
    """A request of an agent."""

    path: str
    body: Json
    ignored: Sequence[str]
    """The fields that kvlinker leaves out and names."""


TASK = "Find out why the tide is a day late, and mend it."

VERBS = (
    "Read",
    "Check",
    "Name",
    "Keep",
    "Compare",
    "Follow",
    "Count",
    "Write down",
    "Leave",
    "Sort",
    "Measure",
    "Open",
    "Repeat",
    "Trace",
    "Explain",
)
THINGS = (
    "the nearest file",
    "each caller",
    "the last result",
    "a failing test",
    "the user's words",
    "every path that was given",
    "the smallest change",
    "an older branch",
    "the table of settings",
    "whatever the tool returned",
    "two or three lines",
    "the name of the module",
    "a number with its unit",
)
REASONS = (
    "before anything else is changed",
    "so that nobody has to guess",
    "while the build is still running",
    "unless it was done in this session",
    "because the next step depends on it",
    "and say in one sentence what you found",
    "even if it looks finished",
    "when more than one answer is possible",
    "as long as the folder stays the same",
    "and stop where the order is unclear",
    "without touching generated files",
)


def prose(name: str, length: int) -> str:
    """Return a text of exactly ``length`` characters, always the same for a name: paragraphs, lists
    and headings, as instructions have them."""
    chosen = random.Random(name)
    parts: list[str] = []
    for number in count():
        if sum(map(len, parts)) >= length:
            return "".join(parts)[:length].rstrip().ljust(length, ".")
        sentences = [
            f"{chosen.choice(VERBS)} {chosen.choice(THINGS)} {chosen.choice(REASONS)}."
            for _ in range(chosen.randint(3, 7))
        ]
        if number % 4 == 3:
            parts.append(f"## {chosen.choice(THINGS).capitalize()} {number}\n\n")
        if number % 3 == 1:
            parts.append("\n".join(f"- {sentence}" for sentence in sentences) + "\n\n")
        else:
            parts.append(" ".join(sentences) + "\n\n")
    raise AssertionError


def call_id(turn: int) -> str:
    return f"call_{turn:08d}"


CODEX_TOOLS = """
exec_command 82, cmd 25, justification 70, login 45, max_output_tokens 87, prefix_rule 118, shell 61
write_stdin 80, session_id 47, chars 72, max_output_tokens 87, yield_time_ms 128
request_user_input 120, questions 56
view_image 124, path 39
get_goal 122
create_goal 265, objective 151, token_budget 73
update_goal 1541, status 370
"""
CODEX_AGENTS = """
close_agent 298, target 37
resume_agent 89, id 19
send_input 215, target 39, interrupt 98, items 96, message 76
spawn_agent 5989, fork_context 111, items 96, message 71, model 77, reasoning_effort 79
wait_agent 252, targets 77, timeout_ms 120
"""


def codex(session: Session) -> Request:
    """Return a request of Codex CLI 0.171."""

    def functions(table: str) -> list[Json]:
        return [
            {
                "type": "function",
                "name": name,
                "description": text,
                "strict": False,
                "parameters": schema,
            }
            for name, text, schema in session.tools(table)
        ]

    def said(role: str, *texts: str) -> Json:
        content = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": content}

    place = session.repository
    where = (
        f"<environment_context>\n  <cwd>{place.folder}</cwd>\n  <shell>bash</shell>\n"
        f"  <current_date>{place.date}</current_date>\n  <roots>{place.folder}</roots>\n"
        "</environment_context>"
    )
    items = [
        said("developer", session.text("codex: instructions", 16979)),
        said("developer", session.text("codex: skills", 2127), session.text("codex: mode", 362)),
        said("user", where),
        said("user", TASK),
    ]
    for turn, (file, result) in enumerate(session.results()):
        items += [
            {
                "type": "function_call",
                "id": f"fc_{turn}",
                "status": "completed",
                "call_id": call_id(turn),
                "name": "exec_command",
                "arguments": json.dumps({"cmd": f"cat {file}"}),
            },
            {
                "type": "function_call_output",
                "id": f"fco_{turn}",
                "call_id": call_id(turn),
                "output": f"Exit code: 0\nOutput:\n{result}",
            },
        ]
    space = {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": session.text("codex: agents", 43),
        "tools": functions(CODEX_AGENTS),
    }
    body = {
        "model": "default",
        "stream": True,
        "input": items,
        "tools": [
            *functions(CODEX_TOOLS),
            space,
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": place.folder,
        "client_metadata": {"session_id": place.folder, "turn_id": str(session.turns)},
    }
    return Request("/v1/responses", body, ("client_metadata", "tools.8", "reasoning.summary"))


CLAUDE_TOOLS = """
Agent 3225, description 42, prompt 33, subagent_type 50, model 358, effort 341, isolation 221
Bash 2110, command 22, timeout 70, description 926, run_in_background 181
Edit 360, file_path 39, old_string 19, new_string 63, replace_all 53
ListAgents 1433, channel 41, q 41, cursor 96
Read 790, file_path 37, offset 92, limit 83, pages 113, allow_large 281
ReportFindings 574, level 30, findings 60
ScheduleWakeup 3396, delaySeconds 98, reason 136, prompt 355, stop 154, noop 307
Skill 1417, skill 71, args 32
ToolSearch 952, query 99, max_results 48
Workflow 3496, script 207, name 105, title 62, args 280, scriptPath 329, resumeFromRunId 568
DeferredToolPlaceholder 83
Write 240, file_path 71, content 32
"""


def claude_code(session: Session) -> Request:
    """Return a request of Claude Code 2.1.332, whose billing line differs each time."""
    marked: Json = {"cache_control": {"type": "ephemeral"}}

    def text(said: str, **more: Any) -> Json:
        return {"type": "text", "text": said, **more}

    place = session.repository
    status = (
        f"# gitStatus\nThe state when the session began.\n\nCurrent branch: {place.branch}\n\n"
        f"Status:\n{place.status}"
    )
    where = (
        f"You work here:\n - Primary working directory: {place.folder}\n - Platform: linux\n\n"
        f"{session.text('claude: reminders', 8900)}\n\nToday's date is {place.date}."
    )
    messages: list[Json] = [
        {
            "role": "user",
            "content": [text(status), text(session.text("claude: user", 576)), text(TASK)],
        },
        {"role": "system", "content": where},
    ]
    for turn, (file, result) in enumerate(session.results()):
        use = {"type": "tool_use", "id": call_id(turn), "name": "Bash"}
        done = {"type": "tool_result", "tool_use_id": call_id(turn), "content": result}
        last = marked if turn == session.turns - 1 else {}
        messages += [
            {"role": "assistant", "content": [use | {"input": {"command": f"cat {file}"}}]},
            {"role": "user", "content": [done | {"is_error": False} | last]},
        ]
    memory = f"{session.text('claude: rules', 3553)}\n\nKeep notes in {place.folder}/.memory.\n\n"
    tools: list[Json] = [
        {
            "name": name,
            "description": said,
            "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema,
        }
        for name, said, schema in session.tools(CLAUDE_TOOLS)
    ]
    tools[-2]["defer_loading"] = True
    body = {
        "model": "default",
        "messages": messages,
        "system": [
            text(f"x-anthropic-billing-header: cc_version=2.1; cch={session.turns:05x};"),
            text(session.text("claude: who", 62), **marked),
            text(memory + session.text("claude: memory", 3100), **marked),
        ],
        "tools": tools,
        "metadata": {"user_id": json.dumps({"session_id": place.folder})},
        "max_tokens": 1024,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    ignored = ("context_management", "tools.10.defer_loading", "output_config.effort")
    return Request("/v1/messages?beta=true", body, ignored)


def chat(messages: list[Json], **fields: Any) -> Request:
    body = {"model": "default", "messages": messages, "stream": True} | fields
    return Request("/v1/chat/completions", body, ())


def chat_tools(session: Session, table: str) -> list[Json]:
    return [
        {
            "type": "function",
            "function": {"name": name, "description": text, "parameters": schema},
        }
        for name, text, schema in session.tools(table)
    ]


def chat_turns(session: Session, tool: str) -> list[Json]:
    """Return the turns of a chat in which a tool reads files."""
    said: list[Json] = []
    for turn, (file, result) in enumerate(session.results()):
        function = {"name": tool, "arguments": json.dumps({"command": f"cat {file}"})}
        call = {"id": call_id(turn), "type": "function", "function": function}
        said += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id(turn), "content": result},
        ]
    return said


OPENCODE_TOOLS = """
bash 4628, command 22, timeout 32, workdir 114
edit 1369, filePath 39, oldString 19, newString 62, replaceAll 52
glob 517, pattern 39, path 268
grep 657, pattern 48, path 70, include 65
read 1158, filePath 50, offset 49, limit 54
skill 399, name 43
task 3019, description 43, prompt 33, subagent_type 50, task_id 187, command 36
todowrite 2012, todos 21
webfetch 750, url 29, format 84, timeout 37
write 623, content 32, filePath 71
"""


def opencode(session: Session) -> Request:
    """Return a request of opencode 1.18: the system prompt names the place near its end."""
    place = session.repository
    where = (
        f"<env>\n  Working directory: {place.folder}\n  Workspace root folder: {place.folder}\n"
        f"  Is directory a git repo: yes\n  Platform: linux\n  Today's date: {place.date}\n</env>"
    )
    system = (
        f"{session.text('opencode: rules', 8713)}\n{where}\n{session.text('opencode: skills', 700)}"
    )
    messages = [{"role": "system", "content": system}, {"role": "user", "content": TASK}]
    return chat(
        [*messages, *chat_turns(session, "bash")],
        max_tokens=1024,
        tools=chat_tools(session, OPENCODE_TOOLS),
        tool_choice="auto",
        stream_options={"include_usage": True},
    )


QWEN_TOOLS = """
agent 10716, description 42, prompt 33, fork_turns 255, fork_tools 532, working_dir 508
edit 1518, file_path 61, old_string 322, new_string 150, replace_all 54
get_goal 367
glob 543, pattern 39, path 268
grep_search 452, pattern 61, glob 56, path 70, limit 114
list_agents 1019
notebook_edit 260, notebook_path 73, cell_id 191, new_source 78, cell_type 59, edit_mode 45
read_file 1429, file_path 145, offset 220, limit 261, pages 338
run_shell_command 4946, command 52, is_background 272, timeout 45, description 152, directory 186
skill 1895, skill 48, args 54
tool_call 218, name 49, arguments 68
tool_search 1102, query 99, max_results 48
update_goal 1547, status 80, reason 80, blockerKind 86
write_file 1180, file_path 114, content 33, record_as_artifact 163
"""


def qwen_code(session: Session) -> Request:
    """Return a request of qwen-code 0.24: the system prompt names the place at its end, and the
    first message of the user the place and the day."""
    place = session.repository
    memory = f"{place.folder}/.qwen/memory"
    system = (
        f"{session.text('qwen: rules', 24500)}\nYour memory is in `{memory}`.\n\n"
        f"{session.text('qwen: memory', 4000)}\n\n## {memory}/MEMORY.md\n\nNothing yet."
    )
    where = (
        f"Today's date is {place.date}.\nMy operating system is: linux\nI'm currently working in"
        f" the directory: {place.folder}\nIts files:\n\n{place.status}"
    )
    parts = (
        session.text("qwen: agents", 6099),
        where,
        session.text("qwen: skills", 2625),
        f"The current date is: {place.date}. {session.text('qwen: date', 170)}",
        TASK,
    )
    messages: list[Json] = [
        {"role": "system", "content": system},
        {"role": "user", "content": [{"type": "text", "text": part} for part in parts]},
    ]
    return chat(
        [*messages, *chat_turns(session, "run_shell_command")],
        max_tokens=1024,
        stream_options={"include_usage": True},
        tools=chat_tools(session, QWEN_TOOLS),
    )


def aider(session: Session) -> Request:
    """Return a request of aider 0.86, with files before the last message, and without tools."""
    place = session.repository
    reminder = session.text("aider: form of answers", 850)
    files = "".join(
        f"\n{name}\n```\n{session.text(f'{place.folder}/{name}', 3000)}\n```\n"
        for name in place.changed
    )
    turns = [
        message
        for file, result in session.results()
        for message in (
            {"role": "user", "content": f"Now look at {file}."},
            {"role": "assistant", "content": result},
        )
    ]
    messages: list[Json] = [
        {"role": "system", "content": f"{session.text('aider: rules', 340)}\n{reminder}"},
        {"role": "user", "content": "Change the greeting to be warmer."},
        {"role": "assistant", "content": session.text("aider: example", 201)},
        {"role": "user", "content": session.text("aider: another code base", 100)},
        {"role": "assistant", "content": "Ok."},
        *turns,
        {"role": "user", "content": f"These are the files to change:\n{files}"},
        {"role": "assistant", "content": session.text("aider: files are trusted", 49)},
        {"role": "user", "content": f"{TASK}\n\n{reminder}"},
    ]
    return chat(messages, temperature=0)


AGENTS: Mapping[str, Callable[[Session], Request]] = {
    "codex": codex,
    "claude-code": claude_code,
    "opencode": opencode,
    "qwen-code": qwen_code,
    "aider": aider,
}
"""The functions that make agents' requests, by the agent's name."""

TURNS = 6
"""The calls of tools in whose midst a result is edited."""

CASES: Mapping[str, Sequence[Session]] = {
    "first turn": [Session()],
    "next turn": [Session(turns=1)],
    "after an edit in the middle": [Session(turns=TURNS), Session(turns=TURNS, edited=TURNS // 2)],
    "another repository": [Session(repository=OTHER)],
}
"""An agent's requests by case, in order. The last request of a case is measured, and may read KV
that the requests before it computed."""
