"""The README's examples, pasted, give what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```.*?```\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", [0, 1])
def test_examples(number, tmp_path):
    assert len(EXAMPLES) == 2
    program, shown = EXAMPLES[number]
    environment = os.environ | {"KVLINKER_STATE_DIR": str(tmp_path)}
    kvlinker = Path(sys.executable).with_name("kvlinker")
    if "localhost:8000" in program:
        command = [kvlinker, "serve", "--port", "0"]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as server:
            try:
                url = next(
                    found[1] for line in server.stdout if (found := re.search(r"address\s+(http://[\d.:]+)", line))
                )
                printed = run(program.replace("http://localhost:8000", url), environment)
            finally:
                server.terminate()
    else:
        printed = run(program, environment)
    assert printed == shown


def run(program, environment):
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout
