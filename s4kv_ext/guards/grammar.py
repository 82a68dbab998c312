"""A grammar that does not compile ends its own request, not the engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from s4kv_ext import page_tags
from s4kv_ext.guards.limits import limit

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import (
        StructuredOutputBackend,
        StructuredOutputGrammar,
    )

MAX_DEPTH = 100  # of a schema: checking it takes 0.2 s, 4.5 s at 400 and over 25 s at 900
# Characters of a grammar. The worst found, an object with many properties, compiles for 4 s at
# 73,000 and for the square of it beyond; grammars that come later wait.
MAX_TEXT = 65_536
VARIABLE = "S4KV_MAX_GRAMMAR"  # another bound
WHAT = "the grammar of this request cannot be used: "


def failed(error: Exception) -> StructuredOutputGrammar:
    """A grammar in place of one that did not compile. The request is scheduled as any other, and
    its first token is refused, which ends it with this error as its stop reason."""
    from vllm.logger import init_logger
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    class FailedGrammar(StructuredOutputGrammar):
        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
            return False

        def validate_tokens(self, tokens: list[int]) -> list[int]:
            return []

        def rollback(self, num_tokens: int) -> None:
            pass

        def fill_bitmask(self, bitmask: Any, idx: int) -> None:
            bitmask[idx].fill_(-1)

        def is_terminated(self) -> bool:
            return True  # nothing is asked of the model

        def reset(self) -> None:
            pass

    grammar = FailedGrammar()
    text = str(error).strip() or type(error).__name__
    grammar.error = WHAT + text[:500]
    init_logger("vllm.s4kv_ext").warning("a grammar did not compile: %.500s", text)
    return grammar


def error_of(grammar: object) -> str | None:
    """What is wrong with a grammar that failed; None of one that did not."""
    error = getattr(grammar, "error", None)
    return error if isinstance(error, str) else None


OTHERS = ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens")


def why_refused(grammar: object, request: Request) -> str | None:
    """Why a grammar refused the token that was drawn: it failed, or the request rules out by other
    means all that it allows. None where neither is so, which is a fault of ours."""
    if error := error_of(grammar):
        return error
    others = [name for name in OTHERS if getattr(request.sampling_params, name, None)]
    return f"{WHAT}{' and '.join(others)} may leave it no token" if others else None


def sound(
    grammar: StructuredOutputGrammar, backend: StructuredOutputBackend
) -> StructuredOutputGrammar:
    """Raise ValueError for a grammar that compiles and allows nothing, as left recursion and
    circular references do: the answer would be an empty text or an internal error."""
    if not grammar.is_terminated():
        mask = backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(mask, 0)
        matcher = getattr(grammar, "ll_matcher", None)  # guidance allows the last token then
        if not mask.any() or (matcher is not None and matcher.get_error()):
            raise ValueError("it allows no text")
    return grammar


def raise_if_failed(output: RequestOutput) -> None:
    """On the API server's side: the client's error (400) if its grammar was at fault, the server's
    (500) that says so if a page was."""
    for o in output.outputs:
        if o.finish_reason != "error":
            continue
        why = str(o.stop_reason)
        if why.startswith(WHAT):
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(why, parameter="structured_outputs")
        if why.startswith(page_tags.WHAT):
            from vllm.entrypoints.openai.engine.protocol import GenerationError
            from vllm.v1.engine.async_llm import InputStreamError  # its cause is raised as it is

            raise InputStreamError(GenerationError(why))


def check_size(params: StructuredOutputsParams) -> None:
    """Raise ValueError if a grammar is longer than compiling it may take, or a schema nested too
    deeply."""
    schemas = [params.json, params.structural_tag]
    texts = [params.regex, params.grammar, *schemas, *(params.choice or ())]
    length = sum(len(t if isinstance(t, str) else json.dumps(t)) for t in texts if t is not None)
    if length > (most := limit(VARIABLE, MAX_TEXT)):
        raise ValueError(
            f"the grammar has {length} characters, more than the {most} that this server takes "
            f"(its environment variable {VARIABLE})"
        )
    for schema in schemas:
        level = [json.loads(schema) if isinstance(schema, str) else schema]
        for _ in range(MAX_DEPTH):
            level = [
                child
                for parent in level
                if isinstance(parent, dict | list)
                for child in (parent.values() if isinstance(parent, dict) else parent)
            ]
        if level:
            raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep")
