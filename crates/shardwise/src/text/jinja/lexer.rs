//! The source of a template as tokens, with the white space that Jinja removes.

use super::{Problem, check};

/// Tokens of a template; the largest public templates have a tenth of it. It bounds the memory of what is parsed.
const MOST_TOKENS: usize = 1 << 16;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token<'s> {
    /// Text between tags.
    Data(&'s str),
    /// `{{` and `}}`.
    PrintBegin,
    PrintEnd,
    /// `{%` and `%}`.
    TagBegin,
    TagEnd,
    Name(&'s str),
    Text(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
}

/// Operators, longer ones first.
const OPERATORS: [&str; 26] = [
    "==", "!=", "<=", ">=", "//", "**", "+", "-", "*", "/", "%", "~", "<", ">", "=", "(", ")", "[", "]", "{", "}", ".",
    ",", ":", "|", ";",
];

/// The tokens of a source with the lines on which they begin.
pub(super) fn tokens(source: &str) -> Result<Vec<(Token<'_>, u32)>, Problem> {
    let mut lexer = Lexer { source, at: 0, line: 1, tokens: Vec::new() };
    // Jinja drops one line feed at the end.
    let end = source.strip_suffix('\n').unwrap_or(source).len();
    lexer.source = &source[..end];
    lexer.template().map_err(|problem| problem.at(lexer.line))?;
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    tokens: Vec<(Token<'s>, u32)>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn skip(&mut self, bytes: usize) {
        self.line += self.rest()[..bytes].bytes().filter(|&byte| byte == b'\n').count() as u32;
        self.at += bytes;
    }

    fn push(&mut self, token: Token<'s>) -> Result<(), Problem> {
        self.tokens.push((token, self.line));
        check(self.tokens.len() <= MOST_TOKENS, || format!("more than {MOST_TOKENS} tokens"))
    }

    fn template(&mut self) -> Result<(), Problem> {
        // Whether what comes next is at the beginning of a line.
        let mut line_start = true;
        loop {
            let Some(begin) = next_tag(self.rest()) else {
                return self.data(self.rest().len(), self.rest().len());
            };
            let tag = &self.rest()[begin..];
            let data = &self.rest()[..begin];
            let kind = tag.as_bytes()[1];
            let sign = tag.as_bytes().get(2).copied().unwrap_or(b' ');
            self.data(stripped_length(data, kind, sign, line_start), begin)?;
            let opening = 2 + usize::from(sign == b'-' || sign == b'+' && kind != b'{');
            match kind {
                b'#' => {
                    let rest = &self.rest()[2..];
                    let length = rest.find("#}").ok_or_else(|| Problem::new("a comment without an end"))?;
                    self.skip(2 + length);
                    let trims = rest[..length].ends_with('-');
                    let keeps = rest[..length].ends_with('+');
                    self.skip(2);
                    line_start = self.after_tag(trims, keeps, true);
                }
                b'{' => {
                    self.skip(opening);
                    self.push(Token::PrintBegin)?;
                    let (trims, _) = self.expression("}}")?;
                    self.push(Token::PrintEnd)?;
                    line_start = self.after_tag(trims, true, false);
                }
                _ => {
                    if let Some(length) = raw_begin(tag, opening) {
                        line_start = self.raw(length)?;
                        continue;
                    }
                    self.skip(opening);
                    self.push(Token::TagBegin)?;
                    let (trims, keeps) = self.expression("%}")?;
                    self.push(Token::TagEnd)?;
                    line_start = self.after_tag(trims, keeps, true);
                }
            }
        }
    }

    /// Takes `length` bytes, of which the first `kept` are text.
    fn data(&mut self, kept: usize, length: usize) -> Result<(), Problem> {
        if kept > 0 {
            self.push(Token::Data(&self.rest()[..kept]))?;
        }
        self.skip(length);
        Ok(())
    }

    /// Takes the white space after a tag; returns whether a line begins after it.
    fn after_tag(&mut self, trims: bool, keeps: bool, is_block: bool) -> bool {
        let rest = self.rest();
        let length = if trims {
            rest.len() - rest.trim_start().len()
        } else {
            usize::from(is_block && !keeps && rest.starts_with('\n'))
        };
        self.skip(length);
        rest[..length].ends_with('\n')
    }

    /// Takes the text between the tags `raw` and `endraw`, whose first has `length` bytes.
    fn raw(&mut self, length: usize) -> Result<bool, Problem> {
        let trims = self.rest()[..length].ends_with("-%}");
        self.skip(length);
        let line_start = self.after_tag(trims, true, true);
        let mut from = 0;
        loop {
            let found = self.rest()[from..].find("{%").ok_or_else(|| Problem::new("`raw` without `endraw`"))?;
            let begin = from + found;
            let tag = &self.rest()[begin..];
            let sign = tag.as_bytes().get(2).copied().unwrap_or(b' ');
            let opening = 2 + usize::from(sign == b'-' || sign == b'+');
            let inner = tag.get(opening..).unwrap_or_default().trim_start();
            let end = inner.strip_prefix("endraw").map(str::trim_start);
            let closing = end.and_then(|end| {
                let (trims, keeps) = (end.starts_with("-%}"), end.starts_with("+%}"));
                (trims || keeps || end.starts_with("%}"))
                    .then(|| (tag.len() - end.len() + if trims || keeps { 3 } else { 2 }, trims, keeps))
            });
            let Some((length, trims, keeps)) = closing else {
                from = begin + 2;
                continue;
            };
            let data = &self.rest()[..begin];
            self.data(stripped_length(data, b'%', sign, line_start), begin)?;
            self.skip(length);
            return Ok(self.after_tag(trims, keeps, true));
        }
    }

    /// Takes tokens up to `end`; returns whether it has the signs `-` and `+`.
    fn expression(&mut self, end: &str) -> Result<(bool, bool), Problem> {
        let mut open = Vec::new();
        loop {
            let blank = self.rest().len() - self.rest().trim_start().len();
            self.skip(blank);
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return Err(Problem::new(format!("a tag without `{end}`")));
            };
            if open.is_empty() {
                let signed = rest.strip_prefix(['-', '+']).filter(|_| end == "%}" || first == '-');
                if signed.is_some_and(|rest| rest.starts_with(end)) {
                    self.skip(3);
                    return Ok((first == '-', first == '+'));
                }
                if rest.starts_with(end) {
                    self.skip(2);
                    return Ok((false, false));
                }
            }
            if first.is_alphabetic() || first == '_' {
                let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                self.push(Token::Name(&rest[..length]))?;
                self.skip(length);
            } else if first.is_ascii_digit() {
                self.number()?;
            } else if first == '"' || first == '\'' {
                self.text(first)?;
            } else {
                let operator = OPERATORS.iter().find(|operator| rest.starts_with(**operator));
                let operator = *operator.ok_or_else(|| Problem::new(format!("an unexpected {first:?}")))?;
                match operator {
                    "(" => open.push(")"),
                    "[" => open.push("]"),
                    "{" => open.push("}"),
                    ")" | "]" | "}" => {
                        let fits = open.pop() == Some(operator);
                        check(fits, || format!("`{operator}` without its opening bracket"))?;
                    }
                    _ => {}
                }
                self.push(Token::Operator(operator))?;
                self.skip(operator.len());
            }
        }
    }

    fn number(&mut self) -> Result<(), Problem> {
        let rest = self.rest();
        let radix = match rest.get(..2).map(str::to_ascii_lowercase).as_deref() {
            Some("0x") => 16,
            Some("0o") => 8,
            Some("0b") => 2,
            _ => 10,
        };
        if radix != 10 {
            let digits = rest[2..].find(|c: char| !c.is_digit(radix) && c != '_').unwrap_or(rest.len() - 2);
            let text = rest[2..2 + digits].replace('_', "");
            let number =
                i128::from_str_radix(&text, radix).map_err(|_| Problem::new("a number that cannot be read"))?;
            self.push(Token::Int(number))?;
            self.skip(2 + digits);
            return Ok(());
        }
        let digits = |from: usize| {
            let text = &rest[from..];
            from + text.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(text.len())
        };
        let whole = digits(0);
        let mut end = whole;
        let byte = |at: usize| rest.as_bytes().get(at).copied().unwrap_or(0);
        if byte(end) == b'.' && byte(end + 1).is_ascii_digit() {
            end = digits(end + 1);
        }
        if matches!(byte(end), b'e' | b'E') {
            let sign = usize::from(matches!(byte(end + 1), b'+' | b'-'));
            if byte(end + 1 + sign).is_ascii_digit() {
                end = digits(end + 1 + sign);
            }
        }
        let text = rest[..end].replace('_', "");
        let bad = || Problem::new("a number that cannot be read");
        let token = match end == whole {
            true => Token::Int(text.parse().map_err(|_| bad())?),
            false => Token::Float(text.parse().map_err(|_| bad())?),
        };
        self.push(token)?;
        self.skip(end);
        Ok(())
    }

    fn text(&mut self, quote: char) -> Result<(), Problem> {
        let rest = &self.rest()[1..];
        let mut text = String::new();
        let mut chars = rest.char_indices();
        let unfinished = || Problem::new("a text without its closing quote");
        let length = loop {
            let (at, c) = chars.next().ok_or_else(unfinished)?;
            if c == quote {
                break at;
            }
            if c != '\\' {
                text.push(c);
                continue;
            }
            let (_, escaped) = chars.next().ok_or_else(unfinished)?;
            let mut code = |digits: usize| {
                let digits = chars.as_str().get(..digits)?;
                let code = u32::from_str_radix(digits, 16).ok()?;
                for _ in digits.chars() {
                    chars.next();
                }
                Some(code)
            };
            match escaped {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                'a' => text.push('\u{7}'),
                'b' => text.push('\u{8}'),
                'f' => text.push('\u{c}'),
                'v' => text.push('\u{b}'),
                '0' => text.push('\0'),
                '\n' => {}
                '\\' | '\'' | '"' => text.push(escaped),
                'x' | 'u' | 'U' => {
                    let digits = match escaped {
                        'x' => 2,
                        'u' => 4,
                        _ => 8,
                    };
                    let mut found = code(digits);
                    // Two halves of a character outside the first plane.
                    if let Some(high @ 0xd800..=0xdbff) = found
                        && chars.as_str().starts_with("\\u")
                    {
                        let low = chars.as_str().get(2..6).and_then(|digits| u32::from_str_radix(digits, 16).ok());
                        if let Some(low @ 0xdc00..=0xdfff) = low {
                            found = Some(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00));
                            chars.nth(5);
                        }
                    }
                    let problem = || Problem::new(format!("`\\{escaped}` without the digits of a character"));
                    text.push(found.and_then(char::from_u32).ok_or_else(problem)?);
                }
                other => text.extend(['\\', other]),
            }
        };
        self.push(Token::Text(text))?;
        self.skip(length + 2);
        Ok(())
    }
}

/// Where the next tag begins.
fn next_tag(text: &str) -> Option<usize> {
    let mut from = 0;
    while let Some(found) = text[from..].find('{') {
        let at = from + found;
        if matches!(text.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

/// How much of the text before a tag is kept.
fn stripped_length(data: &str, kind: u8, sign: u8, line_start: bool) -> usize {
    if sign == b'-' {
        return data.trim_end().len();
    }
    if kind == b'{' || sign == b'+' {
        return data.len();
    }
    let line = data.rfind('\n').map_or(0, |at| at + 1);
    if (line > 0 || line_start) && data[line..].trim().is_empty() { line } else { data.len() }
}

/// The length of the tag `raw`, if this is one.
fn raw_begin(tag: &str, opening: usize) -> Option<usize> {
    let end = tag.get(opening..)?.trim_start().strip_prefix("raw")?.trim_start();
    let closing = if end.starts_with("-%}") || end.starts_with("+%}") {
        3
    } else if end.starts_with("%}") {
        2
    } else {
        return None;
    };
    Some(tag.len() - end.len() + closing)
}
