//! Formats of C's `printf`, as the filter `format` and the operator `%` have them, and of Python's `str.format`.

use super::expressions::Given;
use super::machine::{Machine, Outcome};
use super::value::TemplateValue;
use super::write::float;
use super::{Problem, check};

/// Digits after the point; more are zeros.
const MOST_PRECISION: usize = 400;

/// How one value is written.
#[derive(Default)]
struct Form {
    fill: Option<char>,
    align: Option<char>,
    plus: Option<char>,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
    group: Option<char>,
    kind: char,
}

impl Machine<'_> {
    pub(super) fn printf(&mut self, format: &str, given: &Given) -> Outcome<TemplateValue> {
        let mut text = String::new();
        let mut values = given.positional.iter();
        let mut rest = format;
        while let Some(at) = rest.find('%') {
            self.push(&mut text, &rest[..at])?;
            rest = &rest[at + 1..];
            let mut named = None;
            if let Some(inner) = rest.strip_prefix('(') {
                let (name, after) = inner.split_once(')').ok_or_else(|| Problem::new("a format without its `)`"))?;
                let mapping = given.positional.first().filter(|value| matches!(value, TemplateValue::Map(_)));
                named = Some(match mapping {
                    Some(mapping) => self.attribute(mapping, name)?,
                    None => given.get(usize::MAX, name).unwrap_or_default(),
                });
                rest = after;
            }
            let mut form = Form::default();
            let flags = rest.len() - rest.trim_start_matches(['-', '+', ' ', '0', '#']).len();
            for flag in rest[..flags].chars() {
                match flag {
                    '-' => form.align = Some('<'),
                    '0' if form.align.is_none() => {
                        form.fill = Some('0');
                        form.align = Some('=');
                    }
                    '+' | ' ' => form.plus = Some(flag),
                    '#' => form.alternate = true,
                    _ => {}
                }
            }
            rest = &rest[flags..];
            let mut next = || values.next().cloned().ok_or_else(|| Problem::new("a format with too few values"));
            form.width = match rest.strip_prefix('*') {
                Some(after) => {
                    rest = after;
                    starred(&next()?)?
                }
                None => number(&mut rest)?.unwrap_or(0),
            };
            if let Some(after) = rest.strip_prefix('.') {
                rest = after;
                form.precision = Some(match rest.strip_prefix('*') {
                    Some(after) => {
                        rest = after;
                        starred(&next()?)?
                    }
                    None => number(&mut rest)?.unwrap_or(0),
                });
            }
            rest = rest.trim_start_matches(['l', 'h', 'L']);
            form.kind = rest.chars().next().ok_or_else(|| Problem::new("a format that ends with `%`"))?;
            rest = &rest[form.kind.len_utf8()..];
            if form.kind == '%' {
                self.push(&mut text, "%")?;
                continue;
            }
            let value = match named {
                Some(value) => value,
                None => next()?,
            };
            if form.align.is_none() || form.align == Some('=') && matches!(form.kind, 's' | 'r' | 'c' | 'a') {
                form.align = Some('>');
                form.fill = None;
            }
            self.formatted(&mut text, &value, &form)?;
        }
        self.push(&mut text, rest)?;
        self.text(&text)
    }

    pub(super) fn str_format(&mut self, format: &str, given: &Given) -> Outcome<TemplateValue> {
        let mut text = String::new();
        let mut automatic = 0;
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            self.push(&mut text, &rest[..at])?;
            let doubled = rest[at..].starts_with("{{") || rest[at..].starts_with("}}");
            if doubled {
                self.push(&mut text, &rest[at..=at])?;
                rest = &rest[at + 2..];
                continue;
            }
            let inner = &rest[at..];
            let end = inner.find('}').filter(|_| inner.starts_with('{'));
            let end = end.ok_or_else(|| Problem::new("a format with a single bracket"))?;
            let field = &inner[1..end];
            check(!field.contains('{'), || "a format inside a format".to_string())?;
            rest = &inner[end + 1..];
            let (field, form) = field.split_once(':').unwrap_or((field, ""));
            let (field, conversion) = field.split_once('!').unwrap_or((field, ""));
            let name_end = field.find(['.', '[']).unwrap_or(field.len());
            let (name, path) = field.split_at(name_end);
            let mut value = match name {
                "" => {
                    automatic += 1;
                    given.positional.get(automatic - 1).cloned()
                }
                _ => match name.parse::<usize>() {
                    Ok(at) => given.positional.get(at).cloned(),
                    Err(_) => given.get(usize::MAX, name),
                },
            }
            .ok_or_else(|| Problem::new("a format with too few values"))?;
            for part in path.split(['.', '[']).skip(1) {
                let part = part.trim_end_matches(']');
                value = match part.parse::<usize>() {
                    Ok(at) => self.item(&value, &at.into())?,
                    Err(_) => self.attribute(&value, part)?,
                };
            }
            if conversion == "r" {
                let mut shown = String::new();
                self.represent(&mut shown, &value)?;
                value = TemplateValue::text(&shown);
            }
            let form = Form::parse(form, &value)?;
            self.formatted(&mut text, &value, &form)?;
        }
        self.push(&mut text, rest)?;
        self.text(&text)
    }

    /// Adds one value.
    fn formatted(&mut self, out: &mut String, value: &TemplateValue, form: &Form) -> Outcome<()> {
        let (sign, digits) = match form.kind {
            's' | 'r' | 'a' => {
                let mut text = String::new();
                if form.kind == 's' {
                    self.write(&mut text, value)?;
                } else {
                    self.represent(&mut text, value)?;
                }
                if let Some(precision) = form.precision {
                    let end = text.char_indices().nth(precision).map_or(text.len(), |(at, _)| at);
                    text.truncate(end);
                }
                (String::new(), text)
            }
            'c' => match value {
                TemplateValue::Int(code) => {
                    let c = u32::try_from(*code).ok().and_then(char::from_u32);
                    (String::new(), c.ok_or_else(|| Problem::new("`%c` of a number without a character"))?.to_string())
                }
                other => (String::new(), self.text_of(other)?.to_string()),
            },
            'd' | 'i' | 'u' | 'x' | 'X' | 'o' | 'b' => {
                let whole = match value {
                    TemplateValue::Int(value) => *value,
                    TemplateValue::Bool(value) => (*value).into(),
                    TemplateValue::Float(value) if value.is_finite() && !matches!(form.kind, 'x' | 'X' | 'o' | 'b') => {
                        value.trunc() as i128
                    }
                    other => return Err(Problem::new(format!("the format `{}` of {}", form.kind, other.kind()))),
                };
                let size = whole.unsigned_abs();
                let (prefix, digits) = match form.kind {
                    'x' => ("0x", format!("{size:x}")),
                    'X' => ("0X", format!("{size:X}")),
                    'o' => ("0o", format!("{size:o}")),
                    'b' => ("0b", format!("{size:b}")),
                    _ => ("", grouped(&size.to_string(), form.group)),
                };
                let prefix = if form.alternate { prefix } else { "" };
                (sign_of(whole < 0, form) + prefix, digits)
            }
            'f' | 'F' | 'e' | 'E' | 'g' | 'G' | '%' => {
                let number = match value {
                    TemplateValue::Int(value) => *value as f64,
                    TemplateValue::Bool(value) => f64::from(u8::from(*value)),
                    TemplateValue::Float(value) => *value,
                    other => return Err(Problem::new(format!("the format `{}` of {}", form.kind, other.kind()))),
                };
                let precision = form.precision.unwrap_or(6);
                check(precision <= MOST_PRECISION, || format!("a format with {precision} digits"))?;
                (sign_of(number.is_sign_negative(), form), floating(number.abs(), form, precision))
            }
            other => return Err(Problem::new(format!("the format `{other}`, which does not exist"))),
        };
        let missing = form.width.saturating_sub(sign.chars().count() + digits.chars().count());
        let fill = form.fill.unwrap_or(' ');
        self.charge_text(missing.saturating_mul(fill.len_utf8()).saturating_add(digits.len()))?;
        let pad = |count: usize| fill.to_string().repeat(count);
        let (before, between, after) = match form.align.unwrap_or('>') {
            '<' => (0, 0, missing),
            '^' => (missing / 2, 0, missing - missing / 2),
            '=' => (0, missing, 0),
            _ => (missing, 0, 0),
        };
        out.push_str(&pad(before));
        out.push_str(&sign);
        out.push_str(&pad(between));
        out.push_str(&digits);
        out.push_str(&pad(after));
        Ok(())
    }
}

impl Form {
    /// What comes after the colon in a field of `str.format`.
    fn parse(text: &str, value: &TemplateValue) -> Outcome<Form> {
        let mut form = Form::default();
        let mut rest = text;
        let is_align = |c: char| matches!(c, '<' | '>' | '^' | '=');
        let mut chars = rest.chars();
        match (chars.next(), chars.next()) {
            (Some(fill), Some(align)) if is_align(align) => {
                (form.fill, form.align) = (Some(fill), Some(align));
                rest = chars.as_str();
            }
            (Some(align), _) if is_align(align) => {
                form.align = Some(align);
                rest = &rest[1..];
            }
            _ => {}
        }
        if rest.starts_with(['+', '-', ' ']) {
            form.plus = rest.chars().next().filter(|sign| *sign != '-');
            rest = &rest[1..];
        }
        if let Some(after) = rest.strip_prefix('#') {
            form.alternate = true;
            rest = after;
        }
        if rest.starts_with('0') && form.align.is_none() {
            (form.fill, form.align) = (Some('0'), Some('='));
        }
        form.width = number(&mut rest)?.unwrap_or(0);
        if rest.starts_with([',', '_']) {
            form.group = rest.chars().next();
            rest = &rest[1..];
        }
        if let Some(after) = rest.strip_prefix('.') {
            rest = after;
            form.precision = number(&mut rest)?;
        }
        let is_text = !matches!(value, TemplateValue::Int(_) | TemplateValue::Float(_));
        form.kind = match rest.chars().next() {
            Some(kind) if rest.len() == kind.len_utf8() => kind,
            Some(_) => return Err(Problem::new("a format with something after its type")),
            None if is_text => 's',
            None => match value {
                TemplateValue::Float(_) if form.precision.is_some() => 'g',
                TemplateValue::Float(_) => 's',
                _ => 'd',
            },
        };
        let default = if is_text { '<' } else { '>' };
        form.align = form.align.or(Some(default));
        Ok(form)
    }
}

/// Takes digits.
fn number(rest: &mut &str) -> Outcome<Option<usize>> {
    let length = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (digits, after) = rest.split_at(length);
    *rest = after;
    if digits.is_empty() {
        return Ok(None);
    }
    digits.parse().map(Some).map_err(|_| Problem::new("a format with a width beyond all texts"))
}

fn starred(value: &TemplateValue) -> Outcome<usize> {
    match value {
        TemplateValue::Int(width) => {
            usize::try_from(*width).map_err(|_| Problem::new("a format with a width that is negative or too large"))
        }
        other => Err(Problem::new(format!("a format with {} as its width", other.kind()))),
    }
}

fn sign_of(negative: bool, form: &Form) -> String {
    if negative { "-".to_string() } else { form.plus.map(String::from).unwrap_or_default() }
}

/// Digits with a mark after every third.
fn grouped(digits: &str, mark: Option<char>) -> String {
    let Some(mark) = mark else { return digits.to_string() };
    let mut result = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            result.push(mark);
        }
        result.push(digit);
    }
    result
}

/// A float that is not negative.
fn floating(number: f64, form: &Form, precision: usize) -> String {
    if !number.is_finite() {
        return float(number);
    }
    let exponential = |precision: usize| {
        let text = format!("{number:.precision$e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, size) = exponent.strip_prefix('-').map_or(('+', exponent), |size| ('-', size));
        (digits.to_string(), format!("e{sign}{size:0>2}"), exponent.parse::<i64>().unwrap_or(0))
    };
    let text = match form.kind {
        'e' | 'E' => {
            let (digits, exponent, _) = exponential(precision);
            digits + &exponent
        }
        'g' | 'G' => {
            let precision = precision.max(1);
            let (digits, text, exponent) = exponential(precision - 1);
            let short = |digits: &str| match digits.contains('.') {
                true => digits.trim_end_matches('0').trim_end_matches('.').to_string(),
                false => digits.to_string(),
            };
            if exponent < -4 || exponent >= precision as i64 {
                short(&digits) + &text
            } else {
                short(&format!("{number:.*}", (precision as i64 - 1 - exponent) as usize))
            }
        }
        '%' => format!("{:.precision$}%", number * 100.0),
        _ => {
            let text = format!("{number:.precision$}");
            let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
            grouped(whole, form.group) + rest
        }
    };
    if form.kind.is_ascii_uppercase() { text.to_uppercase() } else { text }
}
