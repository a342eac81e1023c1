"""Verdicts on classes of models are kept, and become a table; the models are tried elsewhere."""

import pytest
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError
from kvlinker_lab.cli import app
from kvlinker_lab.models.verdicts import COMMANDS, Verdict, read_linked, table, write_table
from kvlinker_lab.models.vllm_verdicts import VerdictsFile, verdicts_in_vllm

LLAMA, BAMBA = Verdict("llama", error=4e-6), Verdict("bamba", reason="it keeps a state")


def test_a_page_keeps_the_rows_of_all_kinds(tmp_path):
    page = tmp_path / "models.md"
    page.write_text("all rows")
    run = CliRunner().invoke(app, ["models", "llama", "--page", str(page)])
    assert run.exit_code == 2
    assert "leave the KINDs or --page out" in " ".join(run.output.split())
    assert page.read_text() == "all rows"


def test_kept_verdicts_are_not_tried_again(tmp_path):
    kept = VerdictsFile(tmp_path / "verdicts.json")
    for verdict in (LLAMA, BAMBA):
        kept.add(verdict)
    again = VerdictsFile(tmp_path / "verdicts.json")
    assert list(verdicts_in_vllm(["bamba", "llama"], again)) == [BAMBA, LLAMA]


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"llama": 3}')
    with pytest.raises(InvalidRequestError, match="has no verdicts"):
        VerdictsFile(tmp_path / "other.json")


def test_reasons_that_differ_in_names_and_figures_are_one_row():
    told = "cannot be linked exactly in vLLM. Relative errors over 1e-04: move: 2.0e-01"
    verdicts = [Verdict(name, reason=f"{name}ForCausalLM {told}") for name in ("One", "Two")]
    assert "| `One`, `Two` | no: the model cannot be linked exactly in vLLM | |" in table(verdicts)


def test_rows_leave_out_what_to_do_and_which_layer_it_was():
    told = "keeps a state in its layer model.layers.3.mixer; serve it with vLLM alone."
    verdicts = [Verdict(name, reason=f"{name}ForCausalLM {told}") for name in ("One", "Two")]
    assert "| `One`, `Two` | no: the model keeps a state in its layer | |" in table(verdicts)


def test_each_engine_has_a_table_of_its_own(tmp_path):
    page = tmp_path / "models.md"
    marks = [f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in COMMANDS.values()]
    page.write_text("".join(marks))
    write_table(page, [LLAMA, BAMBA])
    write_table(page, [BAMBA], "vllm")
    assert read_linked(page) == {"llama": True, "bamba": False}
    assert read_linked(page, "vllm") == {"bamba": False}
