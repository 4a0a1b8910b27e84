"""Chat templates that differ in what they do with the controls of thinking, in Jinja, for scripted and for real engines.

    TEMPLATES  {name: Jinja}, as one kind of model each has it
    render(jinja, chat) -> the prompt of a chat (a dict); raises Refused
"""
from functools import cache

import jinja2

TURNS = """
{%- for t in tools or [] -%}{{- '<|tool|>' ~ t | tojson -}}{%- endfor -%}
{%- for m in messages -%}
  {{- '<|' ~ m.role ~ '|>' -}}
  {%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content or [] -%}{{- part.text or '' -}}{%- endfor -%}{%- endif -%}
{%- endfor -%}
"""
# System messages at the front alone, and a tool's fields without the rest of its schema.
STRICT = """
{%- for t in tools or [] -%}
  {{- '<|tool|>' ~ t.function.name -}}
  {%- for name, field in t.function.parameters.properties.items() -%}{{- name ~ ': ' ~ field.type ~ ' ' ~ field.description -}}{%- endfor -%}
{%- endfor -%}
{%- for m in messages -%}
  {%- if m.role == 'system' and not loop.first -%}{{- raise_exception('System message must be at the beginning.') -}}{%- endif -%}
  {{- '<|' ~ m.role ~ '|>' -}}
  {%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content or [] -%}{{- part.text or '' -}}{%- endfor -%}{%- endif -%}
{%- endfor -%}
"""
OPENED = "{{- '<|assistant|><think>' -}}"
BY_SWITCH = "{{- '<|assistant|>' ~ ('</think>' if NAME is defined and not NAME else '<think>') -}}"
# GLM 5.3: two words, and whatever else it is told, or nothing, means a third level.
HEADER = """
{{- '<|system|>Reasoning Effort: ' ~ {'low': 'Low', 'high': 'High'}.get(reasoning_effort if reasoning_effort is defined else '', 'Max') -}}
"""
# The same without a word for that one, and without any where none is asked for.
LEVELS = """
{%- if reasoning_effort is defined -%}
  {{- '<|effort|>' ~ ({'low': 'Think little.', 'high': 'Think well.'}.get(reasoning_effort, 'Think of everything.')) -}}
{%- endif -%}
"""
ECHO = "{%- if reasoning_effort is defined -%}{{- '<|effort|>' ~ reasoning_effort -}}{%- endif -%}"

TEMPLATES = {
    "glm": LEVELS + TURNS + BY_SWITCH.replace("NAME", "enable_thinking"),
    "no-switch": HEADER + TURNS + OPENED,
    "qwen": STRICT + BY_SWITCH.replace("NAME", "enable_thinking"),
    "glm-4.6": TURNS + BY_SWITCH.replace("NAME", "enable_thinking"),
    # It thinks only where it is told to.
    "deepseek": TURNS + "{{- '<|assistant|>' ~ ('<think>' if thinking is defined and thinking else '</think>') -}}",
    "gpt-oss": "{{- 'Reasoning: ' ~ (reasoning_effort or 'medium') -}}" + STRICT + "{{- '<|assistant|>' -}}",
    "echo": ECHO + TURNS + OPENED,
    "echo-switch": ECHO + TURNS + BY_SWITCH.replace("NAME", "enable_thinking"),
    # A word that it does not know is an error.
    "raising": "{%- if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] -%}"
               "{{- raise_exception('reasoning_effort must be none or high') -}}{%- endif -%}" + TURNS
               + "{{- '<|assistant|>' ~ ('</think>' if reasoning_effort is defined and reasoning_effort == 'none' else '<think>') -}}",
    # Its switch is for the thoughts of earlier turns alone.
    "earlier": "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>' -}}"
               "{%- if m.role == 'assistant' and (enable_thinking is not defined or enable_thinking) -%}"
               "{{- '<think>' ~ (m.reasoning_content or '') ~ '</think>' -}}{%- endif -%}{{- m.content -}}{%- endfor -%}" + OPENED,
    "thinking-only": TURNS + OPENED,
    "none": TURNS + "{{- '<|assistant|>' -}}",
}


class Refused(Exception):
    """The template raised an exception, of which these are the words."""


def raise_exception(words):
    raise Refused(words)


@cache
def compiled(source):
    environment = jinja2.Environment()
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def render(source, chat):
    names = {"messages": chat["messages"], "tools": chat.get("tools"), "add_generation_prompt": True}
    try:
        return compiled(source).render(**names, **(chat.get("chat_template_kwargs") or {}))
    except (jinja2.TemplateError, TypeError) as error:
        raise Refused(str(error)) from None
