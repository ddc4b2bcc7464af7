"""Chat templates of an enemy: they get nowhere, end in time, and the next request is served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.front_end.text import chat_template as chat_template_module
from cb_backend.front_end.text.chat_template import ChatTemplate
from tests.waiting import WAIT_S


@pytest.fixture
def template() -> Iterator[Callable[[str], ChatTemplate]]:
    made: list[ChatTemplate] = []

    def make(source: str) -> ChatTemplate:
        made.append(ChatTemplate(source))
        return made[-1]

    yield make
    for each in made:
        each.close()


MARK = "/tmp/cb_backend_template_was_here"
ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch " + MARK + "') }}",
    "{{ namespace.__init__.__globals__['os'].popen('touch " + MARK + "').read() }}",
    "{{ raise_exception.__globals__.os }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ '%2000000000d' % 1 }}",
]


@pytest.mark.parametrize("source", ATTACKS)
def test_e6_attacks_end_in_an_error(template: Callable[[str], ChatTemplate], source: str) -> None:
    """Case E6: no attribute walk, no endless work, no side effect; and the next request is served."""
    with pytest.raises(InvalidRequestError, match="the model's chat template") as caught:
        template(source).render({"messages": []})
    assert len(str(caught.value)) < 400
    assert not os.path.exists(MARK)


@pytest.mark.parametrize("source", [
    "{% if x %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}fine",
    "{% set n = namespace(t='ab') %}{% for i in range(40 if x else 0) %}{% set n.t = n.t ~ n.t %}{% endfor %}fine",
    "{% if x %}{% for i in range(99999) %}{{ 'y' * 1000 }}{% endfor %}{% endif %}fine",
])  # fmt: skip
def test_e6_time_and_size_are_limited_and_the_next_request_is_served(
    template: Callable[[str], ChatTemplate], source: str
) -> None:
    chat_template = template(source)
    assert chat_template.render({"x": False}) == "fine"
    with pytest.raises(InvalidRequestError, match=r"took longer than|out of memory|gave more than|ended its process"):
        chat_template.render({"x": True})
    assert chat_template.render({"x": False}) == "fine"


def test_a_worker_that_does_not_get_to_run_is_waited_for(
    template: Callable[[str], ChatTemplate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own time is limited, not that of a busy machine."""
    monkeypatch.setattr(chat_template_module, "RENDER_TIMEOUT_S", 0.3)
    chat_template = template("fine")
    assert chat_template.render({}) == "fine"
    worker = chat_template._worker
    assert worker is not None
    worker.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, worker.send_signal, (signal.SIGCONT,)).start()
    assert chat_template.render({}) == "fine"
    assert chat_template._worker is worker


def test_a_templates_own_refusal_is_the_clients_reason(template: Callable[[str], ChatTemplate]) -> None:
    chat_template = template("{{ raise_exception('roles must\nalternate ' ~ 'x' * 1000) }}")
    with pytest.raises(InvalidRequestError, match="chat template refuses the messages: roles must alternate x"):
        chat_template.render({})
    with pytest.raises(InvalidRequestError, match="cannot be used: TemplateSyntaxError"):
        template("{% for %}").render({})


def test_what_templates_of_checkpoints_use(template: Callable[[str], ChatTemplate]) -> None:
    source = "{% generation %}{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    source += "{% endgeneration %}{{ strftime_now('%Y') | length }}{{ {'a': '<é>'} | tojson }}{{ absent is defined }}"
    assert template(source).render({}) == '014{"a": "<é>"}False'
    assert template("{{ a }}{% for m in messages %}{{ m }}{% endfor %}").variables() == {"a", "messages"}


def test_a_worker_ends_in_an_endless_template_though_nobody_is_left_to_kill_it() -> None:
    """Its front end was killed: all that it could notice is the end of its input, which it does not come to read."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    command = [sys.executable, str(chat_template_module._WORKER), "2.0"]  # seconds of a core for each question
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(endless).encode() + b"\n")
            worker.stdin.flush()
            assert json.loads(worker.stdout.readline()) == {"variables": []}
            worker.stdin.write(b"{}\n")
            worker.stdin.close()
            assert worker.wait(WAIT_S) == -signal.SIGPROF
        finally:
            worker.kill()
