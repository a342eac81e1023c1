"""The salts of linked prompts, which keep their KV apart in vLLM's prefix cache."""

from __future__ import annotations

from tests.engines.embedded.conftest import linked_prompt

from kvlinker.linking import Link, parse_policy
from kvlinker_vllm.frontend.linker import StoredLink


def test_one_transfer_plan_has_another_salt_for_every_tenant() -> None:
    prompt = linked_prompt(60, 40, seed=22)

    def linked(policy: str) -> StoredLink:
        return StoredLink(
            Link.begin(prompt, parse_policy(policy)), layers=2, keys=("0" * 64, "1" * 64)
        )

    salts = [
        linked(policy).salt(tenant) for policy in ("naive", "legolink-4") for tenant in ("a", "b")
    ]
    assert len(set(salts)) == 4
    assert linked("naive").salt("a") == salts[0], "a tenant's own link finds its KV again"
