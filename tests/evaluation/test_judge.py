# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""The judge's client against a server on loopback, and its verdicts."""

import threading
import time

import pytest
from judge_server import FALSE, TRUE, completion, judge_server

from diff_transformer.evaluation.protocols.hallucination.judge import (
    PROMPT,
    Judge,
    JudgeError,
    Reply,
    ask_all,
    read_verdict,
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)


def judge(server, **changes):
    return Judge(server.url, "gpt-4o", **{"timeout": 5.0, **changes})


def ask(judge, prompt="Is it?"):
    ((_, reply),) = ask_all(judge, {"id": prompt}, concurrency=1)
    return reply


VERDICTS = {
    True: [TRUE, "Conclusion: True", "x\nConclusion: True.\n\n", "x\n `Conclusion: True` "],
    False: [FALSE, "x\n**Conclusion:** False", "Conclusion: True\nNo, wait.\nConclusion: False"],
    None: [
        *("", "True", "conclusion: true", "The Conclusion: True", "Conclusion: True or False", "Conclusion: Truely"),
        *("Conclusion: True\nThat is all.", "Conclusion: Partially True"),
    ],
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_read_verdict(verdict):
    for text in VERDICTS[verdict]:
        assert read_verdict(text) is verdict, text


def test_prompt_asks_for_the_explanation_first_and_the_verdict_last():
    prompt = PROMPT.format(document="{doc}", ground_truth="[gt]", output="out")
    assert prompt.index("{doc}") < prompt.index("[gt]") < prompt.index("\nout\n") < prompt.index("Explain first")
    assert [read_verdict("x\n" + prompt.split('"')[i]) for i in (-4, -2)] == [True, False]


@pytest.mark.parametrize("key", ["sk-secret", None])
def test_ask_sends_the_prompt_and_its_own_key(key, monkeypatch):
    """Neither the Hub's token nor the key in the environment. All tests set HF_HUB_OFFLINE."""
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, "sk-ambient")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/sk-ambient")
    with judge_server(TRUE) as server:
        assert ask(judge(server, api_key=key, max_tokens=77)) == Reply(TRUE, True, "judge-2026-01-01")
        ((path, headers, body),) = server.requests
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", f"Bearer {key or 'EMPTY'}")
    assert "sk-ambient" not in str(headers)
    messages = [{"role": "user", "content": "Is it?"}]
    assert body == {"model": "gpt-4o", "messages": messages, "temperature": 0, "max_tokens": 77}


def test_ask_reads_no_verdict_from_a_reply_cut_by_its_limit():
    """Its last line may quote the prompt."""
    cut = completion("Conclusion: True")
    cut["choices"][0]["finish_reason"] = "length"
    with judge_server(cut) as server:
        assert ask(judge(server)) == Reply("Conclusion: True", None, "judge-2026-01-01")


def test_ask_reads_rejected_content_as_an_empty_text():
    with judge_server(completion(None)) as server:
        assert ask(judge(server)).text == ""


def test_ask_retries_after_errors_and_timeouts():
    answers = [500, (429, {}, ""), "slow", TRUE]

    def script(prompt, times):
        time.sleep(0.5 * (answers[times] == "slow"))
        return answers[times]

    with judge_server(script) as server:
        assert ask(judge(server, timeout=0.3)).verdict is True
        assert server.asked["Is it?"] == 4


REJECTED = "too long for sk-secret"


@pytest.mark.parametrize(
    ("script", "message", "requests"),
    [
        (500, "failed: Error code: 500 no.*--judge_concurrency", 3),
        ((401, {}, REJECTED), r"failed: Error code: 401 too long for \*\*\*.*--judge_key_variable", 1),
        ((200, {}, "<html>"), "no chat completion: <html>", 1),
        ({"error": "busy"}, "no chat completion.*busy", 1),
    ],
)
def test_ask_fails(script, message, requests, monkeypatch):
    monkeypatch.setattr("diff_transformer.evaluation.protocols.hallucination.judge._RETRIES", 2)
    with judge_server(script) as server:
        with pytest.raises(JudgeError, match=f"{message}.*run the same command again") as failed:
            ask(judge(server, api_key="sk-secret"))
        assert len(server.requests) == requests and "sk-secret" not in str(failed.value)


def test_ask_fails_without_a_server():
    with judge_server(TRUE) as server:
        gone = judge(server)
    with pytest.raises(JudgeError, match="refused.*run the same command again"):
        ask(gone)


def test_ask_keeps_the_key_out_of_texts_and_logs(caplog):
    caplog.set_level("DEBUG")
    with judge_server(lambda prompt, times: "You sent sk-secret.\nConclusion: True" if times else 500) as server:
        client = judge(server, api_key="sk-secret")
        assert "sk-secret" not in repr(client)
        assert ask(client).text == "You sent ***.\nConclusion: True"
    assert "Retrying request" in caplog.text and "sk-secret" not in caplog.text


@pytest.mark.parametrize(
    ("url", "model", "key", "message"),
    [
        ("localhost:8000", "m", None, "must be like"),
        ("file:///etc/passwd", "m", None, "must be like"),
        ("http://user:secret@host/v1", "m", None, "environment variable"),
        ("http://host/v1?key=secret", "m", None, "environment variable"),
        ("http://host/v1", "", None, "--judge_model"),
        ("http://host/v1", "m", "secret\n", "printable ASCII"),
        ("http://host/v1", "m", "sécret", "printable ASCII"),
    ],
)
def test_judge_rejects(url, model, key, message):
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


def test_ask_all_yields_the_replies_under_way_then_fails():
    """One of three requests at once is rejected: the other two replies are yielded, and nothing more is asked."""
    ready = threading.Barrier(3)

    def script(prompt, times):
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
