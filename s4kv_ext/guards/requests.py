"""A request that cannot be understood is the client's error, told in a few lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

from s4kv_ext.guards.limits import limit

MAX_TEXT = 2000  # characters of an error message
MAX_ID = 128  # characters of a request id; those that trace systems use have 16 to 64
ERRORS_TOLD = 5
# Characters that are tokenized. One word of 50 million, which is the worst, takes minutes, and
# others wait; the longest texts that fit into a context have fewer than 16 a token.
TOKENIZED = 1_000_000
A_TOKEN = 16
TOKENIZED_VARIABLE = "S4KV_MAX_TEXT"


def bounded_text(text: str) -> str:
    """An error message may quote what the client sent, and that may be of any size."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} characters)"


def bounded_id(text: str) -> str:
    """A request id as it may stand in logs and in every chunk of a stream: printable ASCII without
    blanks, not long. One that is too long stays recognisable and its own."""
    clean = re.sub(r"[^!-~]", "_", text[: MAX_ID + 1])
    if len(clean) <= MAX_ID:
        return clean
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{clean[: MAX_ID - 17]}-{digest}"


def bound_id_of(request: Any) -> None:
    """The same for the body's field ``request_id``."""
    if isinstance(given := getattr(request, "request_id", None), str):
        request.request_id = bounded_id(given)


def check_text(text: str, max_tokens: int | None) -> None:
    """Raises an error of the client if a text is longer than tokenizing it may take."""
    from vllm.exceptions import VLLMValidationError

    most = limit(TOKENIZED_VARIABLE, max(TOKENIZED, A_TOKEN * (max_tokens or 0)))
    if len(text) > most:
        raise VLLMValidationError(
            f"the text has {len(text)} characters, more than the {most} that this server tokenizes "
            f"(its environment variable {TOKENIZED_VARIABLE})",
            parameter="input_text",
        )


def is_object(body: bytes) -> bool:
    """Whether a JSON text is an object, by its first character."""
    return re.match(rb"[ \t\r\n]*\{", body) is not None


def describe(errors: Sequence[Any]) -> str:
    """Of a body that does not fit the schema: which fields, and why, without the values."""
    told = []
    for e in errors[:ERRORS_TOLD]:
        if isinstance(e, dict):
            where = ".".join(str(p) for p in e.get("loc", ()))
            told.append(f"{where[:200]}: {str(e.get('msg', ''))[:300]}")
        else:
            told.append(str(e)[:300])
    more = f"; and {len(errors) - ERRORS_TOLD} more" if len(errors) > ERRORS_TOLD else ""
    return f"{len(errors)} validation error{'s'[: len(errors) != 1]}: {'; '.join(told)}{more}"


def huge_number(value: Any, path: str = "", depth: int = 8) -> str | None:
    """Where in a value there is an integer that does not fit into 64 bits."""
    if isinstance(value, int):
        return path if not -(2**63) <= value < 2**64 else None
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple | set):
        items = enumerate(value)
    elif fields := (
        getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    ):
        items = ((name, getattr(value, name, None)) for name in fields)
    for name, item in items if depth else ():
        if found := huge_number(item, f"{path}.{name}" if path else str(name), depth - 1):
            return found
    return None


WRONG_TYPE = (AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError)


@contextmanager
def well_typed() -> Iterator[None]:
    """Where a validator looks into a value that is of another type than it thought, the body is
    invalid (pydantic takes a ValueError for that)."""
    try:
        yield
    except WRONG_TYPE as e:
        raise ValueError(f"a field is not of its type: {e}") from e


@contextmanager
def naming(parameter: str) -> Iterator[None]:
    """Whatever goes wrong while this parameter is looked at is an error of the request."""
    from vllm.exceptions import VLLMValidationError

    try:
        yield
    except VLLMValidationError:
        raise
    except Exception as e:
        text = str(e).strip() if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise VLLMValidationError(bounded_text(text), parameter=parameter) from e


def message_of(item: Any) -> Any:
    """An input item of /v1/responses that is a message, as it is. Raises an error of the client for
    one that the model cannot be shown: only messages have a role."""
    from vllm.exceptions import VLLMValidationError

    if isinstance(item, dict) and "role" in item:
        return item
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    raise VLLMValidationError(
        f"an input item of type {kind!r:.100} cannot be shown to the model; messages, reasoning, "
        "function calls and their outputs can",
        parameter="input",
    )


def said(parts: Sequence[Any]) -> str | None:
    """What the assistant said in a message of /v1/responses: its texts and refusals, joined as the
    parts of a chat message are. None if there is a part of another kind."""
    given = [part if isinstance(part, dict) else part.model_dump() for part in parts]
    texts: list[Any] = [part.get("text", part.get("refusal")) for part in given]
    return None if None in texts else "\n".join(texts)


def refused(error: Exception, params: Any) -> Exception:
    """What to tell of an exception that came while a request was made ready for the engine. Nothing
    but the request has been looked at by then, so it is the request's."""
    from vllm.exceptions import VLLMValidationError
    from vllm.logger import init_logger

    if isinstance(error, OverflowError) and (where := huge_number(params)):
        return VLLMValidationError(f"{where} does not fit into 64 bits", parameter=where)
    text = f"{type(error).__name__}: {error}".strip(": ")
    init_logger("vllm.s4kv_ext").warning("a request was refused: %.500s", text)
    return ValueError(f"the request cannot be processed: {bounded_text(text)}")
