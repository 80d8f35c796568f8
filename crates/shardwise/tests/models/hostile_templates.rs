//! Chat templates that were written to do harm: each ends in a second and 64 MB, with a text or a typed error.

use std::time::{Duration, Instant};

use shardwise::ErrorKind;
use shardwise::text::{ChatOptions, ChatTemplate, Message, SpecialTokens};
use shardwise_test_suites::own_process::is_alone;
use shardwise_test_suites::process_memory::process_memory;

/// Templates whose source is long or nested, at lengths below and above what is accepted.
fn long_sources() -> Vec<String> {
    let mut all = Vec::new();
    for prefix in ["not ", "-", "+", "(", "[", "{'a':", "not not -", "f(", "x[", "x if "] {
        all.extend([90, 50_000].map(|times| format!("{{{{ {}1 }}}}", prefix.repeat(times))));
    }
    let chains = [
        ".a",
        "|upper",
        "()",
        "[0]",
        " is defined",
        " ~ 1",
        " + 1",
        " * 1",
        " and 1",
        " or 1",
        " == 1",
        " in x",
        " if 1 else 2",
        "|default(1)",
        " 'a'",
    ];
    for suffix in chains {
        all.extend([390, 100_000].map(|times| format!("{{{{ x{} }}}}", suffix.repeat(times))));
    }
    all.push(format!("{{{{ {}{} }}}}", "[".repeat(60_000), "]".repeat(60_000)));
    for (begin, end) in [
        ("if 1", "endif"),
        ("for i in [1]", "endfor"),
        ("with", "endwith"),
        ("filter upper", "endfilter"),
        ("set x", "endset"),
        ("macro m()", "endmacro"),
        ("call m()", "endcall"),
        ("block b", "endblock"),
    ] {
        let nested = |times| format!("{{% {begin} %}}").repeat(times) + "x" + &format!("{{% {end} %}}").repeat(times);
        all.extend([90, 20_000].map(nested));
    }
    all.extend([
        "x".repeat(300_000),
        "{{1}}".repeat(50_000),
        format!("{{{{ [{}] }}}}", "1,".repeat(30_000)),
        format!("{{{{ {{{}}} }}}}", (0..15_000).map(|i| format!("{i}:1,")).collect::<String>()),
        format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(15_000)),
        (0..9_000).map(|i| format!("{{% set v{i} = 1 %}}")).collect::<String>()
            + "{% for i in range(100000) %}{{ v0 }}{% endfor %}",
    ]);
    all
}

/// Templates that enlarge a value again and again, then print, compare or count it.
fn growing_values() -> Vec<String> {
    let steps = [
        "x + x",
        "x ~ x",
        "x * 2",
        "[x, x]",
        "x|join(x)",
        "x.replace('a', x)",
        "[x, x]|join",
        "x ~ [x]",
        "{'a': x, 'b': x}",
        "(x, x)",
        "[x]|tojson",
        "x|replace('a', x)",
        "x.join([x, x])",
        "'%s%s' % (x, x)",
        "'{0}{0}'.format(x)",
        "x|list + [x]",
        "x|center(99999999)",
        "x|indent(99999999)",
        "[x, [x, x]]",
        "dict(a=x, b=x)",
        "namespace(a=x, b=x)",
        "x|string ~ x",
        "x|batch(1)|list",
        "x + [x]",
        "[x] + [x]",
        "x|tojson(indent=9999)",
    ];
    let uses = ["x", "x|tojson", "x == x", "x < x", "x|string|length", "x in [x]", "[x, x]|sort|unique|list|length"];
    let mut all = Vec::new();
    for step in steps {
        for start in ["'ab'", "['a']"] {
            for last in uses {
                let body = format!("{{% set x = ns.x %}}{{% set ns.x = {step} %}}");
                all.push(format!(
                    "{{% set ns = namespace(x={start}) %}}{{% for i in range(64) %}}{body}{{% endfor %}}\
                     {{% set x = ns.x %}}{{{{ {last} }}}}"
                ));
            }
        }
    }
    all
}

/// Single calls that ask for much.
const LARGE_CALLS: [&str; 46] = [
    "'%999999999d'|format(1)",
    "'%.999999999f'|format(1)",
    "'%*d'|format(999999999, 1)",
    "'{:999999999}'.format(1)",
    "'a'|indent(2**62)",
    "'a\nb'|indent(2**62)",
    "'a'.center(2**62)",
    "'a'.ljust(2**40)",
    "'a'.zfill(2**40)",
    "'a' * 2**62",
    "[1] * 2**40",
    "range(2**62)",
    "range(10**9)|list",
    "range(100000)|list|string",
    "[1]|batch(2**62, 0)|list",
    "[1]|slice(2**62)|list",
    "2**2**62",
    "9**9**9",
    "x|tojson(indent=2**62)",
    "'a'|truncate(2**62)",
    "(range(100000)|list) * 100000",
    "range(100000)|list|join('a' * 1000000)",
    "('a' * 1000000).replace('a', 'b' * 1000000)",
    "('a' * 1000000).replace('', 'b' * 1000)",
    "('ab' * 500000).split('a')|tojson",
    "('a' * 4000000)|list",
    "('a' * 1000000)|reverse|list|sort",
    "range(100000)|map('string')|sort|list",
    "range(30000)|unique|list",
    "1.5|round(2**31)",
    "'x'|int(0, 2**40)",
    "strftime_now('%A' * 100000)",
    "('a' * 3000000).strip('b' * 1000 + 'a')",
    "'a'|attr('a' * 1000000)",
    "raise_exception('a' * 5000000)",
    "('é' * 1000000)|tojson(ensure_ascii=true)",
    "('\n' * 1000000)|indent(100)",
    "(' ' * 2000000).split()",
    "('a ' * 1000000).split()|length",
    "('a\n' * 1000000).splitlines()|length",
    "('<' * 2000000)|e",
    "('\\x01' * 2000000)|tojson",
    "[('\\x01' * 2000000)]|string",
    "('a' * 2000000)|title|upper|lower",
    "range(0, 10, 2**126)|list",
    "x[2**100:2**120:2**126]",
];

/// Loops, macros and namespaces without an end.
const PROGRAMS: [&str; 19] = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('ab') }}",
    "{% macro m(x) %}{{ m([x, x]) }}{% endmacro %}{{ m('ab') }}",
    "{% macro m() %}{% call m() %}x{% endcall %}{% endmacro %}{{ m() }}",
    "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call m() %}{% call m() %}x{% endcall %}{% endcall %}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns|tojson }}",
    "{% set ns = namespace() %}{% set ns.a = [ns, ns, ns] %}{{ ns }}",
    "{% set ns = namespace() %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace() %}{% for i in range(190) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}{{ ns.l == ns.l }}",
    "{% for i in range(100000) %}{% set ns = namespace(a=1) %}{% endfor %}x",
    "{% for i in range(100000) %}{% macro m() %}{% endmacro %}{% endfor %}x",
    "{% for i in range(100000) %}{{ raise_exception }}{{ loop }}{% endfor %}",
    "{% set ns = namespace(l=0) %}{% for i in [1] %}{% set ns.l = loop %}{% endfor %}{{ ns.l.index }}",
    "{% set x = 'a' * 200000 %}{% for i in range(100000) %}{{ 'b' in x }}{{ x|length }}{{ x[5] }}{% endfor %}",
];

#[test]
fn hostile_templates_end_within_a_second_and_64_mb() {
    if !is_alone(module_path!(), "hostile_templates_end_within_a_second_and_64_mb") {
        return;
    }
    let mut all = long_sources();
    all.extend(growing_values());
    all.extend(LARGE_CALLS.map(|call| format!("{{{{ {call} }}}}")));
    all.extend(PROGRAMS.map(String::from));
    let raw = "x".repeat(100_000);
    all.push(format!("{{% for a in range(100000) %}}{raw}{{% endfor %}}"));
    all.push(format!("{{% set y %}}{{% for a in range(100000) %}}{raw}{{% endfor %}}{{% endset %}}"));
    assert!(all.len() >= 100, "{}", all.len());

    let mut options = ChatOptions::default();
    options.variables.insert("x".into(), "ab".into());
    let render = |source: &str| {
        let messages = [Message::new("user", "Hello")];
        ChatTemplate::new(source)?.render(&messages, &options, &SpecialTokens::default())
    };
    let (mut texts, mut errors) = (0, 0);
    for source in &all {
        let shown: String = source.chars().take(200).collect();
        // The machine may be busy with something else: the shortest of three times counts.
        let mut shortest = Duration::MAX;
        for _ in 0..3 {
            let start = Instant::now();
            let result = render(source);
            shortest = shortest.min(start.elapsed());
            let (_, peak) = process_memory();
            assert!(peak < 64 << 20, "{} MB after {shown}", peak >> 20);
            match &result {
                Ok(_) => texts += 1,
                Err(error) => {
                    assert!(matches!(error.kind(), Some(ErrorKind::Model | ErrorKind::Data)), "{shown}: {error}");
                    errors += 1;
                }
            }
            if shortest < Duration::from_secs(1) {
                break;
            }
        }
        assert!(shortest < Duration::from_secs(1), "{shortest:?} for {shown}");
    }
    // Both kinds of ends are there: the cases do not all fail for a reason that is none of theirs.
    assert!(texts > 50 && errors > 100, "{texts} texts, {errors} errors of {} templates", all.len());
}

/// What is bounded grows with what is rendered: an honest template needs no more for a long conversation.
#[test]
fn long_conversations_render() {
    let source = "{% for m in messages %}{% set c = m.content.strip() %}{{ '<|' + m.role + '|>' ~ c }}\
                  {% if loop.last or messages[loop.index0 + 1].role == 'user' %}\n{% endif %}{% endfor %}";
    let template = ChatTemplate::new(source).unwrap();
    for (count, length) in [(20_000, 20), (20, 200_000)] {
        let content = "word ".repeat(length / 5);
        let messages: Vec<Message> = (0..count).map(|i| Message::new(["user", "assistant"][i % 2], &content)).collect();
        let text = template.render(&messages, &ChatOptions::default(), &SpecialTokens::default()).unwrap();
        assert!(text.len() > count * (length - 1) && text.starts_with("<|user|>word"));
    }
}
