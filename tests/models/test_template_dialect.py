"""What chat templates of models are written in: Jinja as transformers and llama.cpp extend it."""

from __future__ import annotations

from datetime import datetime

import pytest

from pipeinfer.errors import RequestError
from pipeinfer.models.locate import open_tokenizer
from pipeinfer.models.text import chat_template
from pipeinfer.models.text.tokenizer import Tokenizer
from tests.kit.random_model import RandomSpec, write_random_model

TALK = {"messages": [{"role": "user", "content": "hi"},
                     {"role": "assistant", "content": "<think>x</think>yes"}],
        "tools": [{"name": "f", "note": "<ü>"}], "text": '{"a": [1, "é"]}'}


@pytest.mark.parametrize(("template", "text"), [
    # SmolLM3 and Phi-4-reasoning mark what the model was trained on
    ("{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
     "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
     "hi\n<think>x</think>yes"),
    ("{%- generation -%}\n  a\n{%- endgeneration -%}", "a"),
    ("{% generation %}{% set x = 'set inside' %}{% endgeneration %}{{ x }}", "set inside"),
    ("{% for i in range(9) %}{% generation %}{% if i == 2 %}{% break %}{% endif %}{{ i }}"
     "{% endgeneration %}{% endfor %}", "01"),
    ("{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}", "a"),
    # Kimi K2 has a queue of results, DeepSeek V3.2 reads arguments
    ("{% set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = ns.ids.append(m.role) %}"
     "{% endfor %}{{ ns.ids.pop(0) }} {{ ns.ids | join }}", "user assistant"),
    ("{% set d = {} %}{% do d.update({'a': 1}) %}{{ d.a }}", "1"),
    ("{{ (text | from_json).a[0] }} {{ (text | fromjson).a | last }}", "1 é"),
    # options of tojson
    ("{{ tools | tojson }}", '[{"name": "f", "note": "<ü>"}]'),
    ("{{ tools | tojson(ensure_ascii=True) }}", '[{"name": "f", "note": "<\\u00fc>"}]'),
    ("{{ tools | tojson(separators=(',', ':')) }}", '[{"name":"f","note":"<ü>"}]'),
    ("{{ tools | tojson(separators=[',', ': ']) }}", '[{"name": "f","note": "<ü>"}]'),
    ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
    ("{{ {'b': [1]} | tojson(indent=2) }}", '{\n  "b": [\n    1\n  ]\n}'),
    ("{{ {'b': 'ü'} | tojson(true, 1) }}", '{\n "b": "\\u00fc"\n}'),
    ("{{ tools | tojson() | length }}", "30"),
    ("{{ messages | map(attribute='role') | tojson }}", '["user", "assistant"]'),
    # the rest of what templates do
    ("{{ strftime_now('%d %b %Y') }}", f"{datetime.now():%d %b %Y}"),
    ("{{ strftime_now('%f') | length }}", "6"),
    ("{% if strftime_now is defined %}a{% endif %}{% if documents is defined %}b{% endif %}", "a"),
    ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
     "assistant"),
    ("{{ messages[1].content.split('</think>')[-1].lstrip('\\n') }}", "yes"),
    ("{% set x %}{{ messages[0].content }}!{% endset %}{{ x }}", "hi!"),
    ("{% filter upper %}{{ messages[0].content }}{% endfilter %}", "HI"),
    ("{% macro f(m, n=2) %}{{ m }}{{ n }}{% endmacro %}{{ f('a') }}{{ f('b', n=3) }}", "a2b3"),
    ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}",
     "['hi']"),
    ("{% for k, v in tools[0].items() %}{{ k }}{% endfor %}{{ tools[0].get('x', 'd') }}",
     "namenoted"),
    ("{{ 'a' if tools is not none and tools is iterable and tools[0] is mapping }}", "a"),
    ("{{ messages[::-1][0].role }}{{ dict(a=1).a }}{{ tools[0] | dictsort | first | first }}",
     "assistant1name"),
])
def test_it_renders(template, text):
    assert chat_template.render(template, TALK) == text


@pytest.mark.parametrize(("template", "says"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{% unknown %}", "unknown tag 'unknown'"),
    ("{% generation %}", "endgeneration"),
    ("{{ 'x' | from_json }}", "Expecting value"),
    ("{{ nothing | tojson }}", "not JSON serializable"),
    ("{{ [].append.__self__.x }}", "unsafe"),
])
def test_it_is_refused(template, says):
    with pytest.raises(RequestError, match=says):
        chat_template.render(template, TALK)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model") / "m.gguf", RandomSpec(n_layer=1))


PARTS = ("{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }};"
         "{% endif %}{% endfor %}{% endfor %}")


@pytest.mark.parametrize(("template", "text"), [
    (PARTS, "hi;<|im_end|>;"),
    ("{% for m in messages %}{{ m.content[0].text }}|{% endfor %}", "hi|<|im_end|>|"),
    ("{% for m in messages %}{{ m.content | selectattr('type', 'equalto', 'text') | "
     "map(attribute='text') | join }} {% endfor %}", "hi <|im_end|> "),
    ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
     "{{ m.content[0]['text'] }}-{% endif %}{% endfor %}", "hi<|im_end|>"),
    ("{% for m in messages %}text {{ m.content }} {% endfor %}", "text hi text <|im_end|> "),
    ("a constant text", "a constant text"),
])
def test_templates_get_contents_as_they_read_them(monkeypatch, path, template, text):
    monkeypatch.setattr(Tokenizer, "chat_template", template)
    tokenizer = open_tokenizer(path)
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": "<|im_end|>"}]
    assert tokenizer.apply_chat(messages) == text
    tokens = tokenizer.encode_chat(messages)
    assert tokenizer.decode(tokens[1:], special=True) == text
    assert not any(map(tokenizer.is_control, tokens[1:]))
    tokenizer.close()
