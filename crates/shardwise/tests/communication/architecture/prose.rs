//! Splits a source file into its prose (comments and string literals) and its code.

/// A word of prose with the line it stands on, counted from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProseWord {
    pub(crate) line: usize,
    /// In lower case. Empty where a comment or a string ends and at the end of a sentence: no phrase spans that.
    pub(crate) text: String,
}

/// The two halves of a source. Each has as many lines as the source, so that line numbers stay valid.
#[derive(Default)]
pub(crate) struct SplitSource {
    pub(crate) prose: String,
    pub(crate) code: String,
}

/// What the text at a position belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TextKind {
    Code,
    LineComment,
    /// With the number of comments that are open around it: they nest.
    BlockComment(usize),
    /// With the number of `#` of a raw string; none for a string with escapes.
    Literal(Option<usize>),
}

/// Ends a comment or a string in [`SplitSource::prose`].
const END: char = '\u{1}';

/// Splits Rust source. Lines of one comment that follow each other are one text.
pub(crate) fn split_rust(source: &str) -> SplitSource {
    let mut split = SplitSource::default();
    let mut kind = TextKind::Code;
    let mut rest = source;
    while let Some(c) = rest.chars().next() {
        let (next, taken) = match kind {
            TextKind::Code => in_code(rest, &split.code),
            TextKind::LineComment if c == '\n' => (TextKind::Code, 0),
            TextKind::BlockComment(open) if rest.starts_with("/*") => (TextKind::BlockComment(open + 1), 2),
            TextKind::BlockComment(1) if rest.starts_with("*/") => (TextKind::Code, 2),
            TextKind::BlockComment(open) if rest.starts_with("*/") => (TextKind::BlockComment(open - 1), 2),
            TextKind::Literal(None) if rest.starts_with("\\\n") => (kind, 1),
            TextKind::Literal(None) if c == '\\' => (kind, 1 + rest[1..].chars().next().map_or(0, char::len_utf8)),
            TextKind::Literal(None) if c == '"' => (TextKind::Code, 1),
            TextKind::Literal(Some(hashes)) if is_raw_end(rest, hashes) => (TextKind::Code, 1 + hashes),
            _ => (kind, plain_length(rest)),
        };
        let ends = kind != TextKind::Code && next == TextKind::Code;
        let is_one_comment = kind == TextKind::LineComment && continues_comment(rest);
        if ends && !is_one_comment {
            split.prose.push(END);
        }
        let is_prose = kind != TextKind::Code && next == kind;
        let is_code = (kind, next) == (TextKind::Code, TextKind::Code);
        for (half, is_its) in [(&mut split.prose, is_prose), (&mut split.code, is_code)] {
            match is_its || &rest[..taken] == "\n" {
                true => half.push_str(&rest[..taken]),
                false => half.push(' '),
            }
        }
        (kind, rest) = (next, &rest[taken..]);
    }
    split
}

/// What follows at `rest`, which is code, and how many bytes of it are decided by that. `before` is the code so far.
fn in_code(rest: &str, before: &str) -> (TextKind, usize) {
    let in_name = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
    let raw = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r')).filter(|_| !in_name);
    let raw = raw.map(|after| (after, after.len() - after.trim_start_matches('#').len()));
    match raw.filter(|(after, hashes)| after[*hashes..].starts_with('"')) {
        Some((after, hashes)) => return (TextKind::Literal(Some(hashes)), rest.len() - after.len() + hashes + 1),
        None if rest.starts_with("//") => return (TextKind::LineComment, 2),
        None if rest.starts_with("/*") => return (TextKind::BlockComment(1), 2),
        None if rest.starts_with('"') => return (TextKind::Literal(None), 1),
        None => {}
    }
    // A quote as a character is not a string.
    let character = ["'\"'", "'\\\"'"].iter().find(|quote| rest.starts_with(**quote));
    (TextKind::Code, character.map_or_else(|| plain_length(rest), |quote| quote.len()))
}

/// The bytes up to the next character that may begin or end something; at least one character. A line end stands alone.
fn plain_length(rest: &str) -> usize {
    if rest.starts_with('\n') {
        return 1;
    }
    let first = rest.chars().next().map_or(0, char::len_utf8);
    let special = |byte: &u8| matches!(byte, b'\n' | b'"' | b'\'' | b'\\' | b'/' | b'*' | b'r' | b'b');
    rest.as_bytes()[first..].iter().position(special).map_or(rest.len(), |length| first + length)
}

fn is_raw_end(rest: &str, hashes: usize) -> bool {
    rest.strip_prefix('"').is_some_and(|after| after.len() - after.trim_start_matches('#').len() >= hashes)
}

/// Whether the line after a line comment is a comment of the same text: not an empty one.
fn continues_comment(rest: &str) -> bool {
    let next = rest.strip_prefix('\n').unwrap_or(rest).trim_start_matches([' ', '\t']);
    next.starts_with("//") && !next.lines().next().unwrap_or_default().trim_start_matches(['/', '!']).trim().is_empty()
}

/// The words of a prose in order. Hyphens and apostrophes belong to a word; code between backticks or braces (a value in a
/// format string) is one word.
pub(crate) fn words(prose: &str) -> Vec<ProseWord> {
    let mut words = Vec::new();
    for (index, line) in prose.split('\n').enumerate() {
        let mut rest = line;
        while let Some(start) = rest.find(|c: char| is_word(c) || ends_sentence(c) || c == '`' || c == '{') {
            rest = &rest[start..];
            let code =
                rest.strip_prefix('`').map(|code| (code, '`')).or(rest.strip_prefix('{').map(|code| (code, '}')));
            if let Some((code, end)) = code {
                words.push(ProseWord { line: index + 1, text: "`".into() });
                rest = code.split_once(end).map_or(code, |(_, after)| after);
                continue;
            }
            let end = rest.find(|c: char| !is_word(c) && c != '-' && c != '\'').unwrap_or(rest.len());
            // A mark that ends a sentence has no letters: it becomes an empty word.
            let (text, skip) = if end == 0 { ("", 1) } else { (rest[..end].trim_end_matches(['-', '\'']), end) };
            let repeats_end = text.is_empty() && words.last().is_some_and(|last: &ProseWord| last.text.is_empty());
            if !repeats_end {
                words.push(ProseWord { line: index + 1, text: text.to_lowercase() });
            }
            rest = &rest[skip..];
        }
    }
    words
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn ends_sentence(c: char) -> bool {
    matches!(c, END | '.' | ';' | ':' | '?' | '|')
}

#[test]
fn a_source_is_split_into_prose_and_code() {
    let source = "/// One's \"own\" list.\n/// goes on\nfn f<'a>(c: char) {\n    // \n    let s = \"said \\\"so\\\" // here\"; \
                  g('\"', r#\"raw \" text\"#); /* a /* b */ c */\n}\n";
    let split = split_rust(source);
    assert_eq!(split.code.lines().count(), source.lines().count());
    assert_eq!(
        split.code.split_whitespace().collect::<Vec<_>>().join(" "),
        "fn f<'a>(c: char) { let s = ; g('\"', ); }"
    );
    let found = words(&split.prose);
    let texts: Vec<&str> = found.iter().map(|word| word.text.as_str()).collect();
    let expected = "one's own list  goes on  said so here  raw text  a b c ";
    assert_eq!(texts.join(" ").split("  ").collect::<Vec<_>>(), expected.split("  ").collect::<Vec<_>>());
    assert_eq!(found.iter().find(|word| word.text == "goes").unwrap().line, 2);
    assert_eq!(found.iter().find(|word| word.text == "raw").unwrap().line, 5);
    let texts: Vec<String> = words("as `cut(x)` {told:?}it's").into_iter().map(|word| word.text).collect();
    assert_eq!(texts, ["as", "`", "`", "it's"]);
}
