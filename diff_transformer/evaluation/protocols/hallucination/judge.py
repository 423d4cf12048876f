# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A language model behind an OpenAI-compatible API that decides whether an output is free of hallucination.

The questions and the form of the verdict follow Chuang et al. (2024, arXiv:2407.07071), whom the paper follows. The
wording of the prompt is our own.

The client is openai's. `huggingface_hub.InferenceClient` rejects every address under HF_HUB_OFFLINE=1, even that of a
judge on the same machine, and sends the Hub's saved token to it if no other key is given.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import httpx2

if TYPE_CHECKING:
    from openai import OpenAI

PROMPT = """\
Below are a document, a reference, and the output of a model that was asked to summarize the document or to answer \
the question after it. Decide whether the output is accurate, that is, free of hallucination.

The output is accurate if everything it says can be inferred directly from the document, and inaccurate as soon as it \
says anything that the document contradicts or does not contain. An answer must, by the document, be an answer to the \
question. The reference is one good output (of several, if it is a list); an output that differs from it can still be \
accurate. Judge by the document alone, not by what you know from elsewhere.

#Document#
{document}

#Reference#
{ground_truth}

#Output#
{output}

Explain first, by what the document says, why the output is accurate or not. Then end with a line of its own that is \
either "Conclusion: True" (everything is accurate) or "Conclusion: False" (something is not).\
"""

_SET_KEY = "Set the key in the environment variable that --judge_key_variable names."
_RETRIED = (
    "All replies so far are kept. Check that the server runs and can take this many requests at once (fewer: "
    "--judge_concurrency), then run the same command again."
)
_VERDICT = re.compile(r"[*_`]*Conclusion:[*_` ]*(True|False)[*_`.]*")


class JudgeError(OSError):
    """The judge cannot be asked. All replies so far are kept."""


class Reply(NamedTuple):
    text: str
    verdict: bool | None
    model: str | None  # the name that the judge gives itself, often more exact than the requested one
    prompt_tokens: int | None
    completion_tokens: int | None


def read_verdict(text: str) -> bool | None:
    """True if the output is accurate, None if the text does not end with a verdict in the requested form."""
    match = _VERDICT.fullmatch(text.strip().rpartition("\n")[2].strip())
    return None if match is None else match[1] == "True"


@dataclass
class Judge:
    """Raises ValueError for an invalid address, for one that contains a secret, which would end up in the results, and
    for a key that no HTTP header can hold."""

    base_url: str  # of an OpenAI-compatible server, as in http://localhost:8000/v1
    model: str
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int = 1024
    timeout: float = 120.0  # seconds without an answer
    retries: int = 10  # per request; openai waits 0.5, 1, 2, 4, 8, 8, ... seconds, or up to 120 if the server says so

    def __post_init__(self):
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"Got the judge's address {self.base_url!r}; it must be like http://localhost:8000/v1.")
        if url.username or url.password or url.query or url.fragment:
            raise ValueError(
                "The judge's address must not contain a user, a password or parameters, because it is written into "
                f"the results. {_SET_KEY}"
            )
        if not self.model:
            raise ValueError("Got no name of the judge's model; give the one that its server uses: --judge_model.")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError(
                "The judge's key contains characters other than printable ASCII, which no HTTP header can hold. "
                f"{_SET_KEY}"
            )

    def connect(self, stop: threading.Event) -> "OpenAI":
        """A client that begins no request, not even a retry, once `stop` is set. It does not follow redirects, which
        could take the key to another server."""
        from openai import DefaultHttpxClient, OpenAI

        def check_stop(request: httpx2.Request) -> None:
            if stop.is_set():
                raise self._failed("gets no more requests after a failed one.")

        def check_body(response: httpx2.Response) -> None:
            """openai retries what breaks off. This makes it retry a success without a chat completion, too."""
            if response.is_success:
                response.read()
                try:
                    self._parse(response.text)
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    body = self._redacted(response.text)[:200]
                    raise httpx2.DecodingError(f"the body is no chat completion: {body!r}") from error

        hooks: dict[str, list[Callable[..., Any]]] = {"request": [check_stop], "response": [check_body]}
        return OpenAI(
            api_key="-",  # the key is a header of each request; without a value here openai reads OPENAI_API_KEY
            base_url=self.base_url,
            timeout=self.timeout,
            max_retries=self.retries,
            http_client=DefaultHttpxClient(follow_redirects=False, event_hooks=hooks),
        )

    def ask(self, client: "OpenAI", prompt: str) -> Reply:
        """The reply, at temperature 0. Raises JudgeError if a retry cannot help or all retries have failed."""
        from openai import APIConnectionError, APIStatusError, Omit

        try:
            response = client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                max_tokens=self.max_tokens,
                extra_headers={  # instead of those that openai takes from OPENAI_* variables of the environment
                    "Authorization": f"Bearer {self.api_key}" if self.api_key else Omit(),
                    "OpenAI-Organization": Omit(),
                    "OpenAI-Project": Omit(),
                },
            )
        except APIStatusError as error:
            answer = f"{error.status_code} {error.response.reason_phrase}: {self._redacted(error.response.text)[:500]}"
            raise self._failed(f"answered {answer}. {_remedy(error.status_code)}") from None
        except APIConnectionError as error:
            reason = self._redacted(f"{type(error.__cause__).__name__}: {error.__cause__}")
            raise self._failed(f"did not answer ({reason}). {_RETRIED}") from None
        return self._parse(response.text)

    def _failed(self, how: str) -> JudgeError:
        return JudgeError(f"The judge {self.model} at {self.base_url} {how}")

    def _parse(self, body: str) -> Reply:
        content: dict[str, Any] = json.loads(self._redacted(body))
        choice, usage = content["choices"][0], content.get("usage") or {}
        text = choice["message"]["content"] or ""
        verdict = None if choice.get("finish_reason") == "length" else read_verdict(text)  # it may quote the prompt
        return Reply(text, verdict, content.get("model"), usage.get("prompt_tokens"), usage.get("completion_tokens"))

    def _redacted(self, text: str) -> str:
        """A server may repeat the key; it must reach neither a file nor a screen."""
        return text.replace(self.api_key, "***") if self.api_key else text


def ask_all(judge: Judge, prompts: Mapping[str, str], concurrency: int) -> Iterator[tuple[str, Reply]]:
    """Yields the reply to each prompt, with the prompt's id, as it arrives; at most `concurrency` run at once.

    After a failure no request begins. The replies to those under way are still yielded, then JudgeError is raised.
    """
    stop, failure = threading.Event(), None
    todo = iter(prompts.items())
    pending: dict[Future[Reply], str] = {}
    with judge.connect(stop) as client, ThreadPoolExecutor(max_workers=concurrency) as pool:
        try:
            while True:
                if failure is None:
                    for id, prompt in islice(todo, concurrency - len(pending)):
                        pending[pool.submit(judge.ask, client, prompt)] = id
                if not pending:
                    break
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    id, error = pending.pop(future), future.exception()
                    if error is None:
                        yield id, future.result()
                    elif failure is None:
                        failure = error
                        stop.set()
        finally:
            stop.set()
    if failure is not None:
        raise failure


def _remedy(status: int) -> str:
    if status in (401, 403):
        return _SET_KEY
    if status == 404:
        return "Check --judge_model and --judge_base_url, which usually ends with /v1."
    if status in (408, 409, 429) or status >= 500:
        return _RETRIED
    return "Change what the server rejects, then run the same command again."
