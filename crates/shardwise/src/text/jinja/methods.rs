//! Methods of Python's texts, lists and dictionaries.

use super::expressions::Given;
use super::machine::{Machine, Outcome};
use super::value::{TemplateValue, VALUE_BYTES};
use super::{Problem, check};

impl Machine<'_> {
    pub(super) fn method(&mut self, of: &TemplateValue, name: &str, given: &Given) -> Outcome<TemplateValue> {
        let result = match of {
            TemplateValue::Text(text) => self.text_method(text, name, given)?,
            TemplateValue::Map(map) => match name {
                "get" => {
                    let key = given.need(0, "key")?;
                    let found = if self.contains(of, &key)? { Some(self.item(of, &key)?) } else { None };
                    Some(found.or_else(|| given.get(1, "default")).unwrap_or(TemplateValue::None))
                }
                "keys" => Some(TemplateValue::list(self.items(of)?)?),
                "values" => {
                    self.charge_list(map.entries.len())?;
                    Some(TemplateValue::list(map.entries.iter().map(|(_, value)| value.clone()).collect())?)
                }
                "items" => Some(self.pairs(of)?),
                "copy" => Some(of.clone()),
                _ => None,
            },
            TemplateValue::List(list) => match name {
                "count" => {
                    let wanted = given.need(0, "value")?;
                    let mut count = 0usize;
                    for item in &list.items {
                        count += usize::from(self.equal(item, &wanted)?);
                    }
                    Some(count.into())
                }
                "index" => {
                    let wanted = given.need(0, "value")?;
                    let mut found = None;
                    for (at, item) in list.items.iter().enumerate() {
                        if self.equal(item, &wanted)? {
                            found = Some(at.into());
                            break;
                        }
                    }
                    Some(found.ok_or_else(|| Problem::new("`index` of a value that is not in the list"))?)
                }
                "copy" => Some(of.clone()),
                _ => None,
            },
            TemplateValue::Loop(number) => self.loop_method(*number, name, given)?,
            TemplateValue::Undefined => return Err(Problem::new(format!("`{name}` of an undefined value"))),
            _ => None,
        };
        result.ok_or_else(|| Problem::new(format!("{} has no method `{name}`", of.kind())))
    }

    fn loop_method(&mut self, number: usize, name: &str, given: &Given) -> Outcome<Option<TemplateValue>> {
        match name {
            "cycle" => {
                let at = self.loop_at(number)?.at;
                check(!given.positional.is_empty(), || "`cycle` without values".to_string())?;
                Ok(Some(given.positional[at % given.positional.len()].clone()))
            }
            "changed" => {
                let value = TemplateValue::tuple(given.positional.clone())?;
                let last = self.loop_at(number)?.last_changed.clone();
                let same = last.map_or(Ok(false), |last| self.equal(&last, &value))?;
                self.loop_at(number)?.last_changed = Some(value);
                Ok(Some((!same).into()))
            }
            _ => Ok(None),
        }
    }

    fn text_method(&mut self, text: &str, name: &str, given: &Given) -> Outcome<Option<TemplateValue>> {
        // Every method reads the text once or twice.
        self.charge_read(2 * text.len())?;
        let all = |holds: fn(char) -> bool| !text.is_empty() && text.chars().all(holds);
        Ok(Some(match name {
            "upper" | "lower" | "casefold" | "swapcase" | "title" | "capitalize" => {
                // No character grows to more than three times its bytes.
                self.charge_text(3 * text.len())?;
                let changed = change_case(text, name);
                self.text(&changed)?
            }
            "strip" | "lstrip" | "rstrip" => {
                let chars: Option<Vec<char>> = match given.get(0, "chars") {
                    None | Some(TemplateValue::None) => None,
                    Some(_) => {
                        let chars = given.text(0, "chars")?;
                        self.charge_list(chars.len())?;
                        // Each character of the text may be compared with each of these.
                        let comparisons = (chars.len() as u64).saturating_mul(text.len() as u64);
                        self.charge_steps(comparisons / 8)?;
                        Some(chars.chars().collect())
                    }
                };
                let strips = |c: char| chars.as_ref().map_or(c.is_whitespace(), |chars| chars.contains(&c));
                let stripped = match name {
                    "strip" => text.trim_matches(strips),
                    "lstrip" => text.trim_start_matches(strips),
                    _ => text.trim_end_matches(strips),
                };
                self.text(stripped)?
            }
            "split" => self.split(text, given)?,
            "rsplit" => self.rsplit(text, given)?,
            "splitlines" => {
                let keeps = given.flag(0, "keepends");
                let mut lines = Vec::new();
                for line in text.split_inclusive('\n') {
                    let end = line.strip_suffix('\n').map_or(line, |line| line.strip_suffix('\r').unwrap_or(line));
                    self.charge_list(1)?;
                    lines.push(self.text(if keeps { line } else { end })?);
                }
                TemplateValue::list(lines)?
            }
            "partition" | "rpartition" => {
                let separator = given.text(0, "sep")?;
                self.charge_read(separator.len())?;
                let parts =
                    if name == "partition" { text.split_once(&*separator) } else { text.rsplit_once(&*separator) };
                let parts = match (parts, name) {
                    (Some((left, right)), _) => [left, &separator, right],
                    (None, "partition") => [text, "", ""],
                    (None, _) => ["", "", text],
                };
                self.charge_list(3)?;
                TemplateValue::tuple(parts.iter().map(|part| self.text(part)).collect::<Outcome<_>>()?)?
            }
            "startswith" | "endswith" => {
                let parts = match given.need(0, "prefix")? {
                    TemplateValue::List(parts) => {
                        self.charge_list(parts.items.len())?;
                        parts.items.clone()
                    }
                    other => vec![other],
                };
                let mut found = false;
                for part in &parts {
                    let TemplateValue::Text(part) = part else {
                        return Err(Problem::new(format!("`{name}` with {}", part.kind())));
                    };
                    self.charge_steps(1 + part.len().min(text.len()) as u64 / 64)?;
                    found |= if name == "startswith" { text.starts_with(&**part) } else { text.ends_with(&**part) };
                }
                found.into()
            }
            "removeprefix" | "removesuffix" => {
                let part = given.text(0, "prefix")?;
                let rest = if name == "removeprefix" { text.strip_prefix(&*part) } else { text.strip_suffix(&*part) };
                self.text(rest.unwrap_or(text))?
            }
            "replace" => {
                let (old, new) = (given.text(0, "old")?, given.text(1, "new")?);
                let most = given.integer(2, "count")?.filter(|count| *count >= 0);
                let most = most.map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(usize::MAX));
                self.charge_read(old.len())?;
                let count = text.matches(&*old).take(most).count();
                let kept = text.len() - count * old.len();
                self.charge_text(kept.saturating_add(count.saturating_mul(new.len())))?;
                TemplateValue::Text(text.replacen(&*old, &new, count).into())
            }
            "count" => {
                let part = given.text(0, "sub")?;
                self.charge_read(part.len())?;
                text.matches(&*part).count().into()
            }
            "find" | "rfind" | "index" | "rindex" => {
                let part = given.text(0, "sub")?;
                self.charge_read(part.len())?;
                let at = if name.starts_with('r') { text.rfind(&*part) } else { text.find(&*part) };
                match at {
                    Some(at) => text[..at].chars().count().into(),
                    None if name.ends_with("index") => return Err(Problem::new("`index` of a text that is not there")),
                    None => TemplateValue::Int(-1),
                }
            }
            "join" => {
                let items = self.items(&given.need(0, "iterable")?)?;
                self.join(text, &items)?
            }
            "format" => self.str_format(text, given)?,
            "ljust" | "rjust" | "center" | "zfill" => self.padded(text, name, given)?,
            "isspace" => all(char::is_whitespace).into(),
            "isdigit" | "isnumeric" | "isdecimal" => all(char::is_numeric).into(),
            "isalnum" => all(char::is_alphanumeric).into(),
            "isalpha" => all(char::is_alphabetic).into(),
            "isascii" => text.is_ascii().into(),
            "islower" => (text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)).into(),
            "isupper" => (text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)).into(),
            _ => return Ok(None),
        }))
    }

    /// Parts between separators, or between white space if none is given.
    pub(super) fn split(&mut self, text: &str, given: &Given) -> Outcome<TemplateValue> {
        let most = given.integer(1, "maxsplit")?.filter(|most| *most >= 0);
        let most = most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
        let parts: Vec<&str> = match given.get(0, "sep") {
            None | Some(TemplateValue::None | TemplateValue::Undefined) => {
                let count = text.split_whitespace().take(most.saturating_add(1)).count();
                self.charge_list(2 * count)?;
                let mut parts = Vec::with_capacity(count);
                let mut rest = text.trim_start();
                while !rest.is_empty() {
                    if parts.len() == most {
                        parts.push(rest);
                        break;
                    }
                    let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
                    parts.push(&rest[..end]);
                    rest = rest[end..].trim_start();
                }
                parts
            }
            Some(_) => {
                let separator = given.text(0, "sep")?;
                check(!separator.is_empty(), || "`split` with an empty separator".to_string())?;
                self.charge_read(separator.len())?;
                let count = text.matches(&*separator).take(most).count();
                self.charge_list(2 * (count + 1))?;
                text.splitn(count + 1, &*separator).collect()
            }
        };
        self.texts(&parts)
    }

    fn rsplit(&mut self, text: &str, given: &Given) -> Outcome<TemplateValue> {
        let most = given.integer(1, "maxsplit")?.filter(|most| *most >= 0);
        let (Some(most), Some(TemplateValue::Text(separator))) = (most, given.get(0, "sep")) else {
            return self.split(text, given);
        };
        check(!separator.is_empty(), || "`rsplit` with an empty separator".to_string())?;
        self.charge_read(separator.len())?;
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let count = text.matches(&*separator).take(most).count();
        self.charge_list(2 * (count + 1))?;
        let mut parts: Vec<&str> = text.rsplitn(count + 1, &*separator).collect();
        parts.reverse();
        self.texts(&parts)
    }

    fn texts(&mut self, parts: &[&str]) -> Outcome<TemplateValue> {
        TemplateValue::list(parts.iter().map(|part| self.text(part)).collect::<Outcome<_>>()?)
    }

    fn padded(&mut self, text: &str, name: &str, given: &Given) -> Outcome<TemplateValue> {
        let width = given.integer(0, "width")?.unwrap_or(0);
        let fill = match given.get(1, "fillchar") {
            Some(TemplateValue::Text(fill)) if fill.chars().count() == 1 => fill.chars().next().unwrap_or(' '),
            None => ' ',
            Some(_) => return Err(Problem::new(format!("`{name}` with a fill that is not one character"))),
        };
        let missing = width.saturating_sub(text.chars().count() as i128).max(0);
        let missing = usize::try_from(missing).unwrap_or(usize::MAX >> 3).min(usize::MAX >> 3);
        self.charge_text(text.len().saturating_add(missing.saturating_mul(fill.len_utf8())))?;
        let pad = |count: usize| fill.to_string().repeat(count);
        let padded = match name {
            "ljust" => [text, &pad(missing)].concat(),
            "rjust" => [&*pad(missing), text].concat(),
            "zfill" => {
                let sign = usize::from(text.starts_with(['-', '+']));
                [&text[..sign], &"0".repeat(missing), &text[sign..]].concat()
            }
            _ => {
                // Python puts the odd one to the left if the width is odd.
                let left = missing / 2 + usize::from(missing % 2 == 1 && width % 2 == 1);
                [&*pad(left), text, &pad(missing - left)].concat()
            }
        };
        self.charge_steps(padded.len() as u64 / VALUE_BYTES)?;
        Ok(TemplateValue::Text(padded.into()))
    }
}

fn change_case(text: &str, name: &str) -> String {
    match name {
        "upper" => text.to_uppercase(),
        "lower" | "casefold" => text.to_lowercase(),
        "capitalize" => {
            let mut chars = text.chars();
            let first = chars.next().map(|first| first.to_uppercase().to_string()).unwrap_or_default();
            first + &chars.as_str().to_lowercase()
        }
        "swapcase" => text
            .chars()
            .map(|c| if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() })
            .collect(),
        _ => {
            let mut result = String::new();
            let mut inside = false;
            for c in text.chars() {
                if inside {
                    result.extend(c.to_lowercase());
                } else {
                    result.extend(c.to_uppercase());
                }
                inside = c.is_alphabetic();
            }
            result
        }
    }
}
