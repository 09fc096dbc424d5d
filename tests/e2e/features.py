"""What a cut request can do and still answer what it answers uncut: the cases of `test_features` and the README's table.

`python -m tests.e2e.features` writes the table into the README.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.adapter import ADAPTER

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- features: begin -->", "<!-- features: end -->"

EOS = 2
FEW_TOKENS = {"allowed_token_ids": list(range(300, 312))}
"""A random model that may say anything never repeats itself, and would hide penalties."""
SEEDED = {"temperature": 0.9, "seed": 7}
LETTERS = {"regex": "([a-z]{2,6} ){20,200}"}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "tags": {"type": "array", "maxItems": 3}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SUMS = 'root ::= term (" + " term){6,60}\nterm ::= [0-9]{1,3}'


@dataclass(frozen=True)
class Feature:
    """params: of a request that uses it. without: of the request that differs in nothing else; its answer must differ.

    group: line of the README's table. ends_early: the answer may end before `max_tokens`.
    """

    group: str
    params: dict[str, Any]
    without: dict[str, Any] | None = field(default_factory=dict)


FEATURES = {
    "greedy": Feature("greedy", {}, None),
    "temperature": Feature("`temperature`, `seed`", SEEDED),
    "seed": Feature("`temperature`, `seed`", SEEDED | {"seed": 8}, SEEDED),
    "top_k": Feature("`top_k`, `top_p`, `min_p`", SEEDED | {"top_k": 3}, SEEDED),
    "top_p": Feature("`top_k`, `top_p`, `min_p`", SEEDED | {"top_p": 0.4}, SEEDED),
    "min_p": Feature("`top_k`, `top_p`, `min_p`", SEEDED | {"min_p": 0.4}, SEEDED),
    "presence_penalty": Feature("presence, frequency and repetition penalty", FEW_TOKENS | {"presence_penalty": 1.9}, FEW_TOKENS),
    "frequency_penalty": Feature("presence, frequency and repetition penalty", FEW_TOKENS | {"frequency_penalty": 1.5}, FEW_TOKENS),
    "repetition_penalty": Feature("presence, frequency and repetition penalty", FEW_TOKENS | {"repetition_penalty": 1.9}, FEW_TOKENS),
    "seeded penalties": Feature(
        "presence, frequency and repetition penalty",
        FEW_TOKENS | SEEDED | {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        FEW_TOKENS | SEEDED,
    ),
    "logit_bias": Feature("`logit_bias`, `bad_words`", FEW_TOKENS | {"logit_bias": {"305": 4.0}}, FEW_TOKENS),
    "bad_words": Feature("`logit_bias`, `bad_words`", {"bad_words": "two tokens of the answer"}),
    "stop": Feature("`stop`, `stop_token_ids`", {"stop": "two tokens of the answer"}),
    "stop_token_ids": Feature("`stop`, `stop_token_ids`", {"stop_token_ids": "a token of the answer"}),
    "min_tokens": Feature(
        "`min_tokens`, `max_tokens`, `ignore_eos`",
        {"stop_token_ids": "a token of the answer", "min_tokens": 25},
        {"stop_token_ids": "a token of the answer"},
    ),
    "max_tokens": Feature("`min_tokens`, `max_tokens`, `ignore_eos`", {"max_tokens": 23}),
    "ignore_eos": Feature(
        "`min_tokens`, `max_tokens`, `ignore_eos`",
        {"ignore_eos": True, "logit_bias": {str(EOS): 12.0}},
        {"ignore_eos": False, "logit_bias": {str(EOS): 12.0}},
    ),
    "logprobs": Feature("`logprobs`", {"logprobs": 5}),
    "n": Feature("`n` > 1", SEEDED | {"n": 3}, SEEDED),
    "regex": Feature("structured output: regex, JSON schema, grammar", {"structured_outputs": LETTERS, "ignore_eos": False}),
    "seeded regex": Feature(
        "structured output: regex, JSON schema, grammar",
        SEEDED | {"structured_outputs": LETTERS, "ignore_eos": False},
        SEEDED | {"ignore_eos": False},
    ),
    "json": Feature("structured output: regex, JSON schema, grammar", {"structured_outputs": {"json": PERSON}, "ignore_eos": False}),
    "grammar": Feature("structured output: regex, JSON schema, grammar", {"structured_outputs": {"grammar": SUMS}, "ignore_eos": False}),
    "lora": Feature("LoRA adapters", {"model": ADAPTER}),
}


def table() -> str:
    groups = list(dict.fromkeys(feature.group for feature in FEATURES.values()))
    rows = [f"| {group} | {', '.join(name for name, feature in FEATURES.items() if feature.group == group)} |" for group in groups]
    return "\n".join([BEGIN, "| feature | cases of `tests/e2e/test_features.py` |", "|---|---|", *rows, END])


def with_table(readme: str) -> str:
    replaced, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: table(), readme, flags=re.DOTALL)
    assert count == 1, "the README has no place for the table"
    return replaced


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
