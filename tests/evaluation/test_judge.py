# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The judge's client against a server on loopback, and its verdicts."""

import threading
import time
from email.utils import formatdate

import pytest
from judge_server import FALSE, TRUE, JudgeServer, completion, judge_server

from diff_transformer.evaluation.protocols.hallucination.judge import (
    PROMPT,
    Judge,
    JudgeError,
    Reply,
    ask_all,
    read_verdict,
)


@pytest.fixture(autouse=True)
def no_proxy_and_short_waits(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def judge(server, **changes):
    return Judge(server.url, "gpt-4o", **{"retries": 3, "timeout": 5.0, **changes})


def ask(judge, prompt="Is it?"):
    ((_, reply),) = ask_all(judge, {"id": prompt}, concurrency=1)
    return reply


def in_turn(*answers):
    """The first answer to the first request, and so on; then always the last."""
    return lambda prompt, times: answers[min(times, len(answers) - 1)]


VERDICTS = {
    True: [TRUE, "Conclusion: True", "x\nConclusion: True.\n\n", "x\n `Conclusion: True` "],
    False: [FALSE, "x\n**Conclusion:** False", "Conclusion: True\nNo, wait.\nConclusion: False"],
    None: [
        *("", "True", "conclusion: true", "The Conclusion: True", "Conclusion: True or False", "Conclusion: Truely"),
        *("Conclusion: True\nThat is all.", "Conclusion: Partially True"),
    ],
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_verdict(verdict):
    for text in VERDICTS[verdict]:
        assert read_verdict(text) is verdict, text


def test_prompt_asks_for_the_explanation_first_and_the_verdict_last():
    prompt = PROMPT.format(document="{doc}", ground_truth="[gt]", output="out")
    assert prompt.index("{doc}") < prompt.index("[gt]") < prompt.index("\nout\n") < prompt.index("Explain first")
    assert [read_verdict("x\n" + prompt.split('"')[i]) for i in (-4, -2)] == [True, False]


def test_ask_good():
    with judge_server(TRUE) as server:
        found = ask(judge(server, api_key="sk-secret", max_tokens=77))
        assert found == Reply(TRUE, True, "judge-2026-01-01", 100, 10)
        path, headers, body = server.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer sk-secret")
    messages = [{"role": "user", "content": "Is it?"}]
    assert body == {"model": "gpt-4o", "messages": messages, "temperature": 0, "max_tokens": 77}


@pytest.mark.parametrize("key", [None, "sk-own"])
def test_ask_sends_its_own_key_or_none(key, monkeypatch):
    """It sends neither the Hub's token nor what openai reads from the environment. All tests set HF_HUB_OFFLINE."""
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "sk-ambient")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer sk-ambient")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/sk-ambient")
    with judge_server(TRUE) as server:
        ask(judge(server, api_key=key))
        ((path, headers, _),) = server.requests
    assert headers.get("Authorization") == (key and f"Bearer {key}")
    assert "sk-ambient" not in path + str(headers)


def test_ask_through_a_proxy_of_the_environment(monkeypatch):
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy", raising=False)
    with judge_server(TRUE) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        assert ask(Judge("http://judge.invalid/v1", "m")).verdict is True
        assert proxy.requests[0][0] == "http://judge.invalid/v1/chat/completions"


def test_ask_cut_by_its_limit_and_without_usage():
    """The line may quote the prompt, before the verdict."""
    cut = completion("Conclusion: True", usage=None)
    cut["choices"][0]["finish_reason"] = "length"
    with judge_server(cut) as server:
        found = ask(judge(server))
    assert found == Reply("Conclusion: True", None, "judge-2026-01-01", None, None)


def test_ask_with_rejected_content_gets_an_empty_text():
    with judge_server(completion(None)) as server:
        assert ask(judge(server)).text == ""


HTML = (200, {}, "<html>")


@pytest.mark.parametrize("failures", [(500, 503), (JudgeServer.CUT,), ({"error": "busy"}, HTML), ((429, {}),)])
def test_ask_again_until_it_succeeds(failures):
    with judge_server(in_turn(*failures, TRUE)) as server:
        assert ask(judge(server)).verdict is True
        assert 2 <= server.asked["Is it?"] <= 3


@pytest.mark.parametrize("wait", [lambda: "1", lambda: formatdate(time.time() + 2, usegmt=True)])
@pytest.mark.slow
def test_ask_honors_retry_after(wait):
    """Seconds or a date, which has whole seconds, so it is at least one away."""
    with judge_server(in_turn((429, {"Retry-After": wait()}), TRUE)) as server:
        ask(judge(server))
        assert server.times[1] - server.times[0] >= 0.9


REJECTED = "too long for sk-secret"


@pytest.mark.parametrize(
    ("script", "message", "requests"),
    [
        (500, "answered 500 .*--judge_concurrency", 2),
        (HTML, "did not answer.*no chat completion: '<html>'.*run the same command again", 2),
        # A wait of hours, and what a retry cannot help, fail at once
        ((429, {"Retry-After": "7200"}), "answered 429 .*--judge_concurrency", 1),
        ((401, {}, REJECTED), "401.*--judge_key_variable", 1),
        ((404, {}, REJECTED), "404.*--judge_base_url", 1),
        ((400, {}, REJECTED), "400.*too long.*Change what", 1),
    ],
)
def test_ask_fails(script, message, requests):
    with judge_server(script) as server:
        with pytest.raises(JudgeError, match=message) as failed:
            ask(judge(server, retries=1, api_key="sk-secret"))
        assert len(server.requests) == requests and "sk-secret" not in str(failed.value)


def test_ask_slow_runs_into_the_timeout():
    with judge_server(in_turn(JudgeServer.SLOW, TRUE)) as server:
        begin = time.monotonic()
        assert ask(judge(server, timeout=0.2)).verdict is True
        assert time.monotonic() - begin < JudgeServer.SLOW_SECONDS and server.asked["Is it?"] == 2


@pytest.mark.parametrize("status", [302, 307])
def test_ask_follows_no_redirect(status):
    with judge_server(TRUE) as elsewhere, judge_server((status, {"Location": elsewhere.url})) as server:
        with pytest.raises(JudgeError, match=f"answered {status} "):
            ask(judge(server, api_key="sk-secret"))
        assert len(server.requests) == 1 and not elsewhere.requests


def test_ask_unreachable():
    with judge_server(TRUE) as server:
        gone = judge(server, retries=1)
    with pytest.raises(JudgeError, match="refused.*run the same command again"):
        ask(gone)


def test_key_is_in_no_text(caplog):
    caplog.set_level("DEBUG")
    with judge_server(in_turn(500, "You sent sk-secret.\nConclusion: True")) as server:
        client = judge(server, api_key="sk-secret")
        assert "sk-secret" not in repr(client)
        assert ask(client).text == "You sent ***.\nConclusion: True"
    assert "Retrying request" in caplog.text and "sk-secret" not in caplog.text


def test_bad_judges():
    for url, model, key, message in [
        ("localhost:8000", "m", None, "must be like"),
        ("file:///etc/passwd", "m", None, "must be like"),
        ("http://user:secret@host/v1", "m", None, "environment variable"),
        ("http://host/v1?key=secret", "m", None, "environment variable"),
        ("http://host/v1", "", None, "--judge_model"),
        ("http://host/v1", "m", "secret\n", "printable ASCII"),
        ("http://host/v1", "m", "sécret", "printable ASCII"),
    ]:
        with pytest.raises(ValueError, match=message) as failed:
            Judge(url, model, key)
        assert "secret" not in str(failed.value)


def test_ask_all_is_bounded_and_complete():
    with judge_server(TRUE) as server:
        server.delay = 0.05
        found = dict(ask_all(judge(server), {str(i): f"prompt {i}" for i in range(12)}, concurrency=3))
        assert sorted(found, key=int) == [str(i) for i in range(12)]
        assert server.most_at_once == 3, f"{server.most_at_once} requests at once, not 3"
        assert set(server.asked.values()) == {1}


def test_ask_all_yields_what_is_under_way_then_fails():
    """One of three requests at once is rejected: the other two replies are yielded, and nothing more is asked."""
    ready = threading.Barrier(3)

    def script(prompt, times):
        if prompt in ("prompt 0", "prompt 1", "prompt 2"):
            ready.wait(5)
        if prompt == "prompt 0":
            return 401
        time.sleep(0.3)
        return TRUE

    found = {}
    with judge_server(script) as server:
        with pytest.raises(JudgeError, match="401"):
            for id, answer in ask_all(judge(server), {str(i): f"prompt {i}" for i in range(30)}, concurrency=3):
                found[id] = answer
        assert set(found) == {"1", "2"} and len(server.requests) == 3


@pytest.mark.slow
def test_ask_all_failure_ends_the_retries_of_the_others():
    """openai's wait before a retry cannot be interrupted, but no request follows it."""

    def script(prompt, times):
        if prompt == "bad":
            time.sleep(0.3)  # until the other waits
            return 401
        return (429, {"Retry-After": "1"})

    with judge_server(script) as server:
        with pytest.raises(JudgeError, match="401"):
            list(ask_all(judge(server), {"a": "waits", "b": "bad"}, concurrency=2))
        assert server.asked == {"waits": 1, "bad": 1}
