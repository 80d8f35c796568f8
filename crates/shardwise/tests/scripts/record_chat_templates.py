"""Records how transformers renders chat templates, for tests/models/text.rs.

    python record_chat_templates.py > ../data/chat_templates.jsonl
"""

import json

from transformers.utils.chat_template_utils import render_jinja_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TALK = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "What is  <2 & 3>?"},
    {"role": "assistant", "content": "<think>sum\nit</think>\n\nFive. "},
    {"role": "user", "content": "Sure?"},
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image"}, {"type": "text", "text": "this"}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": [1.5, True, None], "é": "\"x\"\n"}}}]},
    {"role": "tool", "content": "3", "name": "add"},
]
REASONED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "reasoning": "greet"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <a> & 'b'",
          "parameters": {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "array"}},
                         "required": ["a", "b"]}}}]

TEMPLATES = [
    # whitespace: trimmed blocks, stripped lines, explicit signs, a last line feed
    "{{ bos_token }}\n  {% for m in messages %}\n  {%- if m.role == 'user' %}\n[U] {{ m['content'] }}\n"
    "  {% else %}\n[{{ m.role | upper }}] {{ m.content }}\n  {%- endif %}\n{% endfor %}\nend {{ eos_token }}\n",
    "{% for m in messages -%}\n   {{- m.role }}\n\n{{+ loop.index0 }}/{{ loop.length }}{% if not loop.last %}, {% endif %}"
    "\n{%+ endfor %}x",
    # namespaces, reversed slices, loop controls
    "{%- set ns = namespace(last=-1, seen=[]) -%}\n{%- for m in messages[::-1] -%}\n"
    "{%- if m.role == 'user' -%}{%- set ns.last = messages | length - 1 - loop.index0 -%}{%- break -%}{%- endif -%}\n"
    "{%- set ns.seen = ns.seen + [m.role] -%}\n{%- endfor -%}\n{{ ns.last }} {{ ns.seen }} {{ messages[1:3] | length }} "
    "{{ messages[-1].content }} {{ messages[:-1] | map(attribute='role') | join('+') }}",
    # Python's methods
    "{%- for m in messages if m.content is string %}{%- set c = m.content.strip() %}"
    "{%- if '</think>' in c %}{{ c.split('</think>')[-1].lstrip('\\n') }}|{{ c.split('</think>')[0].rstrip('\\n').split('<think>')[-1] }}"
    "{%- else %}{{ c.replace('  ', ' ').upper() }}{{ c.startswith('What') }}{{ c.endswith('?') }}{{ c.title() }}{% endif %};"
    "{% endfor %}",
    # tools, calls and their arguments
    "{%- if tools %}\n{%- for tool in tools %}{{ tool | tojson }}\n{{ tool.function.parameters | tojson(indent=2) }}\n"
    "{%- for name, p in tool.function.parameters.properties.items() %}{{ name }}:{{ p.type }}{{ ', ' if not loop.last }}"
    "{%- endfor %}{% endfor %}{% else %}no tools{% endif %}{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls %}"
    "{% for call in m.tool_calls %}{{ call.function.arguments | tojson(ensure_ascii=true, sort_keys=true) }}"
    "{{ call.function.name ~ '(' ~ (call.function.arguments | length) ~ ')' }}{% for k, v in call.function.arguments | items %}"
    "<{{ k }}={{ v | tojson if v is mapping or v is sequence else v | string }}>{% endfor %}{% endfor %}{% endif %}{% endfor %}",
    # contents in parts
    "{%- macro show(content) -%}{%- if content is string -%}{{ content }}{%- elif content is none -%}(none)"
    "{%- elif content is iterable and content is not mapping -%}{%- for p in content -%}"
    "{%- if p['type'] == 'text' -%}{{ p.text }}{%- elif 'image' in p or p.type == 'image' -%}<img>{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}{%- for m in messages -%}{{ m.role + ':' }}{{ show(m.content) }};{%- endfor -%}",
    # values as text, defaults, tests, conditions
    "{{ none }} {{ true }} {{ false }} {{ 1.0 }} {{ 2 / 3 > 0.5 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** 3 }} {{ undefined_name }}."
    "{{ undefined_name | default('d') }} {{ undefined_name is defined }} {{ [1, 'a', None] }} {{ {'k': 'v', 'l': [true]} }}"
    " {{ 'a' if messages else 'b' }} {{ 'x' * 3 }} {{ 'ab' ~ 1 ~ true ~ none }} {{ (1, 2) }} {{ 3 in [1, 2] }} {{ 'q' not in 'abc' }}"
    " {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ range(3) | list }} {{ add_generation_prompt }}"
    " {{ documents is none }} {{ tools is none }} {{ messages[0].get('name', '-') }} {{ messages[0].name is defined }}",
    # set blocks, loop variables, filters with arguments
    "{% set text %}\n<{{ messages[0].role | capitalize }}>\n{% endset %}{{ text | trim }}{% for m in messages %}"
    "{{ loop.previtem.role if not loop.first else '^' }}>{{ m.role | replace('s', 'S') }}{{ loop.nextitem is defined }}{% endfor %}"
    "{{ messages | map(attribute='role') | unique | list | join(' ') }} {{ '%s-%02d' | format('a', 7) }} {{ 'A b' | lower }}"
    " {{ ' a\nb' | indent(2) }} {{ 'abc' | first }}{{ 'abc' | last }} {{ 'a,b,,c'.split(',', 1) }} {{ 'x'.join(['1', '2']) }}",
    # errors of the template itself
    "{% for m in messages %}{% if m.role not in ['user'] %}{{ raise_exception('Only users, not ' + m.role) }}{% endif %}{% endfor %}",
    # marked answers, reasoning, the beginning of an answer
    "{% for m in messages %}{% if m.role == 'assistant' %}\n{%- generation -%} {{ m.reasoning_content }}{{ m.thinking }} {{ m.content }}"
    "{%- endgeneration -%}\n{% else %}{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
]

for number, template in enumerate(TEMPLATES):
    for messages, tools in ((TALK, None), (PARTS, TOOLS), (REASONED, None)):
        for prompt in (False, True):
            case = {"id": f"{number}", "template": template, "messages": messages, "tools": tools, "special": SPECIAL,
                    "add_generation_prompt": prompt, "text": None, "error": None}
            try:
                rendered, _ = render_jinja_template([messages], tools=tools, chat_template=template,
                                                    add_generation_prompt=prompt, **SPECIAL)
                case["text"] = rendered[0]
            except Exception as error:
                case["error"] = str(error)
            print(json.dumps(case))
