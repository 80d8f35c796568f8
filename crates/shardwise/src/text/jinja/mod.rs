//! Jinja for chat templates, with bounds.
//!
//! A template is a program of somebody else. What it may cost is bounded by construction: the size of its source, its tokens, the
//! nesting of what is parsed and of what is executed, the number of steps, where an operation on a text or a list counts as many steps
//! as it reads, and the bytes of all texts and lists that it builds, whether it keeps them or not. Values are immutable and know
//! their depth. An engine that leaves `+`, `~`, `==` and the output of blocks to itself cannot be bounded from outside, which
//! is why this is not an existing engine.
//!
//! * `lexer`, `ast`, `parser`: the source as statements.
//! * `value`: values; `operators`: what operators do with them; `write`: values as text.
//! * `machine`: executes statements; `expressions`: evaluates expressions, both within the budget that `machine` keeps.
//! * `filters`, `sequences`, `predicates`, `methods`, `printf`: what templates call.

mod ast;
mod expressions;
mod filters;
mod lexer;
mod machine;
mod methods;
mod operators;
mod parser;
mod predicates;
mod printf;
mod sequences;
mod value;
mod write;

use std::sync::Arc;

use machine::Machine;
pub(super) use value::TemplateValue;

/// Source of a template: ten times the largest public ones, which describe tools in detail.
const MOST_SOURCE_BYTES: usize = 256 << 10;

/// Stack of the thread that parses and renders. The parser and [`machine`] bound the calls inside each other; this is several times
/// what they take without optimization. Only what is used becomes memory.
const STACK_BYTES: usize = 64 << 20;

/// Why a template cannot be parsed or rendered.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) text: String,
    /// 0 if not known.
    pub(super) line: u32,
}

impl Problem {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Problem { text: text.into(), line: 0 }
    }

    /// With the line, unless it has one.
    fn at(mut self, line: u32) -> Self {
        if self.line == 0 {
            self.line = line;
        }
        self
    }
}

/// An error with this text unless `holds`.
fn check(holds: bool, text: impl FnOnce() -> String) -> Result<(), Problem> {
    if holds { Ok(()) } else { Err(Problem::new(text())) }
}

/// A parsed template.
pub(super) struct Template {
    body: Vec<ast::Statement>,
}

impl Template {
    pub(super) fn parse(source: &str) -> Result<Self, Problem> {
        check(source.len() <= MOST_SOURCE_BYTES, || {
            format!("a source of {} bytes, more than {MOST_SOURCE_BYTES}", source.len())
        })?;
        on_large_stack(|| {
            // Jinja reads all line ends as line feeds.
            let source = match source.contains('\r') {
                true => &source.replace("\r\n", "\n").replace('\r', "\n"),
                false => source,
            };
            let tokens = lexer::tokens(source)?;
            Ok(Template { body: parser::Parser::new(tokens).template()? })
        })
    }

    pub(super) fn render(&self, variables: Vec<(Arc<str>, TemplateValue)>) -> Result<String, Problem> {
        on_large_stack(|| Machine::new(variables).render(&self.body))
    }
}

/// Runs `work` in a thread of its own: the stack of the caller may be small.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T, Problem> + Send) -> Result<T, Problem> {
    std::thread::scope(|scope| {
        let name = "chat template".to_string();
        match std::thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn_scoped(scope, work) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => Err(Problem::new(format!("a thread for the template cannot be started: {error}"))),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(source: &str, value: &str) -> String {
        let value = serde_json::from_str(value).unwrap();
        Template::parse(source).unwrap().render(vec![("x".into(), value)]).unwrap()
    }

    #[test]
    fn json_is_that_of_json_dumps() {
        let value = r#"{"b": [1, 2.5, -3e-7, 1e16, true, null], "a": {"x": "é\"\\\n\u0001\ud83d\ude42 <&'>"}, "e": [], "f": {}}"#;
        // json.dumps(value, ensure_ascii=False), with indent=2 and sort_keys, and with ensure_ascii and separators
        assert_eq!(
            rendered("{{ x | tojson }}", value),
            r#"{"b": [1, 2.5, -3e-07, 1e+16, true, null], "a": {"x": "é\"\\\n\u0001🙂 <&'>"}, "e": [], "f": {}}"#
        );
        assert_eq!(
            rendered("{{ x | tojson(indent=2, sort_keys=true) }}", value),
            "{\n  \"a\": {\n    \"x\": \"é\\\"\\\\\\n\\u0001🙂 <&'>\"\n  },\n  \"b\": [\n    1,\n    2.5,\n    -3e-07,\n    \
             1e+16,\n    true,\n    null\n  ],\n  \"e\": [],\n  \"f\": {}\n}"
        );
        assert_eq!(
            rendered("{{ x | tojson(ensure_ascii=true, separators=(',', ':')) }}", value),
            r#"{"b":[1,2.5,-3e-07,1e+16,true,null],"a":{"x":"\u00e9\"\\\n\u0001\ud83d\ude42 <&'>"},"e":[],"f":{}}"#
        );
    }

    /// The operators and filters that public templates do not all use, against `jinja2` 3.1.6 in Python.
    #[test]
    fn expressions_have_the_values_of_jinja() {
        let value =
            r#"{"l": [1, 2, 3], "s": "abc", "d": {"b": 1, "A": 3}, "m": [{"n": 2}, {"n": 1}, {"n": 2, "k": 0}]}"#;
        for (source, expected) in [
            ("-7 // 2 ~ ' ' ~ -7 % 3 ~ ' ' ~ 7 % -3 ~ ' ' ~ 2 ** 3 ** 2 ~ ' ' ~ -3 ** 2", "-4 2 -2 64 9"),
            ("1 / 3 ~ ' ' ~ 1e16 ~ ' ' ~ 1e-5 ~ ' ' ~ 10 / 2", "0.3333333333333333 1e+16 1e-05 5.0"),
            ("x.l[::-1] ~ x.l[-2:] ~ x.l[9] ~ x.s[::-1] ~ x.s[1:9] ~ x.l[3:0:-1]", "[3, 2, 1][2, 3]cbabc[3, 2]"),
            ("'a' + 'b' ~ 1 == 'ab1'", "True"),
            ("1 < 2 < 3 and not 1 < 2 > 5", "True"),
            (
                r#"['a\'b', "a\"b", 'a\'"b', "\n\\", none, true, 1.5, (1,), zz]"#,
                r#"["a'b", 'a"b', 'a\'"b', '\n\\', None, True, 1.5, (1,), Undefined]"#,
            ),
            (
                "'%s|%5.2f|%-3s|%05d|%x|%+d|%e|%g|%%' % ('a', 2.5, 'b', 42, 255, 3, 12345.678, 0.0001)",
                "a| 2.50|b  |00042|ff|+3|1.234568e+04|0.0001|%",
            ),
            (
                "'{:>4}|{:<4}|{:^4}|{:05d}|{:,}|{:.2f}|{:*^5}|{0}'.format(1, 2, 3, 4, 1234567, 2.345, 'a')",
                "   1|2   | 3  |00004|1,234,567|2.35|**a**|1",
            ),
            ("x.m | map(attribute='n') | sort(reverse=true) | unique | join('+')", "2+1"),
            ("x.m | groupby('n')", "[(1, [{'n': 1}]), (2, [{'n': 2}, {'n': 2, 'k': 0}])]"),
            ("x.m | selectattr('n', 'gt', 1) | rejectattr('k', 'defined') | list", "[{'n': 2}]"),
            (
                "x.d | dictsort ~ x.d | items | list ~ (x.d | dictsort(by='value', reverse=true))",
                "[('A', 3), ('b', 1)][('b', 1), ('A', 3)][('A', 3), ('b', 1)]",
            ),
            ("x.l | batch(2, 0) | list ~ x.l | slice(2) | list", "[[1, 2], [3, 0]][[1, 2], [3]]"),
            ("2.5 | round ~ 2.675 | round(2) ~ 2.1 | round(0, 'ceil') ~ '3.7' | int ~ 'q' | int(7)", "2.02.673.037"),
            (
                "'a,b,c'.rsplit(',', 1) ~ ' a  b '.split() ~ 'a b c'.split(none, 1)",
                "['a,b', 'c']['a', 'b']['a', 'b c']",
            ),
            (
                "'it\\'s foo'.title() ~ 'abc'.center(6) ~ '-5'.zfill(4) ~ 'a-b'.partition('-')",
                "It'S Foo abc  -005('a', '-', 'b')",
            ),
            ("'a\n\nb' | indent(2, true) ~ ('a b c d e f' | truncate(8, true, '!', 0))", "  a\n\n  ba b c d!"),
        ] {
            assert_eq!(rendered(&format!("{{{{ {source} }}}}"), &value.replace('\n', " ")), expected, "{source}");
        }
    }

    #[test]
    fn bad_templates_name_the_line() {
        for (source, line, text) in [
            ("a\n{{ 1 + }}", 2, "unexpected `}}`"),
            ("{% if x %}\n\n{% endfor %}", 3, "unknown tag `endfor`"),
            ("{{ 'a }}", 1, "closing quote"),
            ("{% include 'x' %}", 1, "another template"),
            ("{# a", 1, "comment"),
        ] {
            let problem = Template::parse(source).err().expect(source);
            assert!(problem.line == line && problem.text.contains(text), "{source:?}: {problem:?}");
        }
        let problem = Template::parse("\n{{ 1 }}\n{{ x.y.z }}").unwrap().render(Vec::new()).unwrap_err();
        assert_eq!((problem.line, problem.text.as_str()), (3, "`y` of an undefined value"));
    }
}
