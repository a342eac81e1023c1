"""Chat templates of the kinds that models bring."""

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

# Puts BOS first and trims, as Llama-3 does.
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '\n\n' + m['content'] |"
    " trim + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}{%"
    " endif %}"
)

# Knows no system role and wants the others in turn, as Gemma does.
ALTERNATING = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not"
    " supported') }}{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 %"
    " 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif"
    " %}{{ '<|start|>' + m['role'] + '\n' + m['content'] | trim + '<|end|>\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)

# Rejects content that is no string, and moves the system message into the last user turn, as
# Mistral does.
REORDERING = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% if messages[0].role == 'system' %}{% set"
    " ns.system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}{% for"
    " m in messages %}{% if m.content is not string %}{{ raise_exception('Only string content is"
    " supported') }}{% endif %}{% if m.role == 'user' %}{{ '[INST] ' + (ns.system if loop.last else"
    " '') + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + eos_token }}{% endif"
    " %}{% endfor %}"
)

LAST_ONLY = "{{ messages[-1].content }}"
REPEATING = "{% for m in messages %}{{ m.content + m.content }}{% endfor %}"
WITH_NAMES = "{% for m in messages %}{{ m.name | default(m.role) }}: {{ m.content }}\n{% endfor %}"
