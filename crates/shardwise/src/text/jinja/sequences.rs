//! Filters of lists and dictionaries.

use std::cmp::Ordering;
use std::sync::Arc;

use super::expressions::Given;
use super::machine::{Machine, Outcome};
use super::value::TemplateValue;
use super::{Problem, check};

pub(super) const NAMES: [&str; 24] = [
    "batch",
    "chain",
    "dictsort",
    "first",
    "groupby",
    "items",
    "join",
    "last",
    "list",
    "map",
    "max",
    "min",
    "random",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "sort",
    "sum",
    "unique",
    "zip",
    "tuple",
];

impl Machine<'_> {
    pub(super) fn sequence_filter(
        &mut self,
        name: &str,
        value: &TemplateValue,
        given: &Given,
    ) -> Outcome<TemplateValue> {
        match name {
            "list" => TemplateValue::list(self.items(value)?),
            "tuple" => TemplateValue::tuple(self.items(value)?),
            "first" => Ok(self.items(value)?.first().cloned().unwrap_or_default()),
            "last" => Ok(self.items(value)?.pop().unwrap_or_default()),
            "reverse" => {
                if let TemplateValue::Text(text) = value {
                    self.charge_text(text.len())?;
                    return self.text(&text.chars().rev().collect::<String>());
                }
                let mut items = self.items(value)?;
                items.reverse();
                TemplateValue::list(items)
            }
            "items" => match value {
                TemplateValue::Map(_) | TemplateValue::Undefined => self.pairs(value),
                other => Err(Problem::new(format!("`items` of {}", other.kind()))),
            },
            "join" => {
                let separator = given.get(0, "d").unwrap_or_else(|| TemplateValue::text(""));
                let separator = self.text_of(&separator)?;
                let mut items = self.items(value)?;
                if let Some(attribute) = given.get(1, "attribute") {
                    items = items.iter().map(|item| self.path(item, &attribute)).collect::<Outcome<_>>()?;
                }
                self.join(&separator, &items)
            }
            "sum" => {
                let attribute = given.get(0, "attribute").filter(|name| !name.is_none());
                let mut sum = given.get(1, "start").unwrap_or(TemplateValue::Int(0));
                for item in self.items(value)? {
                    let item = attribute.as_ref().map_or(Ok(item.clone()), |name| self.path(&item, name))?;
                    sum = self.binary(super::ast::Operator::Add, &sum, &item)?;
                }
                Ok(sum)
            }
            "min" | "max" => {
                let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
                let mut best: Option<(TemplateValue, TemplateValue)> = None;
                for (key, item) in self.keyed(value, given.get(1, "attribute"), given.flag(0, "case_sensitive"))? {
                    let wins = match &best {
                        None => true,
                        Some((own, _)) => self.order(&key, own)? == wanted,
                    };
                    if wins {
                        best = Some((key, item));
                    }
                }
                Ok(best.map(|(_, item)| item).unwrap_or_default())
            }
            "sort" => {
                let keyed = self.keyed(value, given.get(2, "attribute"), given.flag(1, "case_sensitive"))?;
                TemplateValue::list(self.sorted(keyed, given.flag(0, "reverse"))?)
            }
            "dictsort" => self.dictsort(value, given),
            "unique" => {
                let mut kept: Vec<TemplateValue> = Vec::new();
                let mut items = Vec::new();
                for (key, item) in self.keyed(value, given.get(1, "attribute"), given.flag(0, "case_sensitive"))? {
                    let mut known = false;
                    for other in &kept {
                        known = known || self.equal(other, &key)?;
                        if known {
                            break;
                        }
                    }
                    if !known {
                        kept.push(key);
                        items.push(item);
                    }
                }
                TemplateValue::list(items)
            }
            "groupby" => self.groupby(value, given),
            "map" => self.map_filter(value, given),
            "select" | "reject" | "selectattr" | "rejectattr" => self.select(name, value, given),
            "batch" | "slice" => self.divide(name, value, given),
            "chain" => {
                let mut items = self.items(value)?;
                for other in &given.positional {
                    let mut more = self.items(other)?;
                    self.charge_list(more.len())?;
                    items.append(&mut more);
                }
                TemplateValue::list(items)
            }
            "zip" => {
                let mut columns = vec![self.items(value)?];
                for other in &given.positional {
                    columns.push(self.items(other)?);
                }
                let count = columns.iter().map(Vec::len).min().unwrap_or(0);
                self.charge_list(count * (columns.len() + 2))?;
                let row = |at: usize| TemplateValue::tuple(columns.iter().map(|column| column[at].clone()).collect());
                TemplateValue::list((0..count).map(row).collect::<Outcome<_>>()?)
            }
            _ => Err(Problem::new(format!("`{name}` has a result that changes; a chat template has one text"))),
        }
    }

    pub(super) fn pairs(&mut self, value: &TemplateValue) -> Outcome<TemplateValue> {
        let TemplateValue::Map(map) = value else { return TemplateValue::list(Vec::new()) };
        self.charge_list(4 * map.entries.len())?;
        let pairs = map.entries.iter().map(|(key, value)| TemplateValue::tuple(vec![key.clone(), value.clone()]));
        TemplateValue::list(pairs.collect::<Outcome<_>>()?)
    }

    pub(super) fn join(&mut self, separator: &str, items: &[TemplateValue]) -> Outcome<TemplateValue> {
        let mut text = String::new();
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                self.push(&mut text, separator)?;
            }
            self.write(&mut text, item)?;
        }
        self.text(&text)
    }

    /// The value at a path such as `function.name` or `0`.
    fn path(&mut self, of: &TemplateValue, path: &TemplateValue) -> Outcome<TemplateValue> {
        let TemplateValue::Text(path) = path else { return self.item(of, path) };
        self.charge_read(path.len())?;
        let mut value = of.clone();
        for part in path.split('.') {
            self.charge_steps(1)?;
            value = match part.parse::<usize>() {
                Ok(index) => self.item(&value, &TemplateValue::Int(index as i128))?,
                Err(_) => self.attribute(&value, part)?,
            };
        }
        Ok(value)
    }

    /// Items with the keys that sort them.
    fn keyed(
        &mut self,
        value: &TemplateValue,
        attribute: Option<TemplateValue>,
        case_sensitive: bool,
    ) -> Outcome<Vec<(TemplateValue, TemplateValue)>> {
        let items = self.items(value)?;
        self.charge_list(2 * items.len())?;
        let attribute = attribute.filter(|attribute| !attribute.is_none());
        let keyed = items.into_iter().map(|item| {
            let key = attribute.as_ref().map_or(Ok(item.clone()), |path| self.path(&item, path))?;
            Ok((self.folded(key, case_sensitive)?, item))
        });
        keyed.collect()
    }

    /// A key without the difference between upper and lower case.
    fn folded(&mut self, key: TemplateValue, case_sensitive: bool) -> Outcome<TemplateValue> {
        match key {
            TemplateValue::Text(text) if !case_sensitive => {
                self.charge_text(2 * text.len())?;
                Ok(TemplateValue::Text(text.to_lowercase().into()))
            }
            other => Ok(other),
        }
    }

    fn dictsort(&mut self, value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        let TemplateValue::Map(map) = value else {
            return Err(Problem::new(format!("`dictsort` of {}", value.kind())));
        };
        let sensitive = given.flag(0, "case_sensitive");
        let by_value = given.get(1, "by").is_some_and(|by| by.as_str() == Some("value"));
        let reverse = given.flag(2, "reverse");
        self.charge_list(4 * map.entries.len())?;
        let keyed = map.entries.iter().map(|(key, value)| {
            let by = self.folded(if by_value { value.clone() } else { key.clone() }, sensitive)?;
            Ok((by, TemplateValue::tuple(vec![key.clone(), value.clone()])?))
        });
        let keyed = keyed.collect::<Outcome<_>>()?;
        TemplateValue::list(self.sorted(keyed, reverse)?)
    }

    fn groupby(&mut self, value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        let path = given.need(0, "attribute")?;
        let default = given.get(1, "default").unwrap_or_default();
        let items = self.items(value)?;
        self.charge_list(4 * items.len())?;
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            let mut key = self.path(&item, &path)?;
            if key.is_undefined() {
                key = default.clone();
            }
            keyed.push((key.clone(), TemplateValue::tuple(vec![key, item])?));
        }
        let mut groups: Vec<(TemplateValue, Vec<TemplateValue>)> = Vec::new();
        for pair in self.sorted(keyed, false)? {
            let TemplateValue::List(pair) = pair else { continue };
            let (key, item) = (pair.items[0].clone(), pair.items[1].clone());
            match groups.last_mut() {
                Some((own, group)) if self.equal(own, &key)? => group.push(item),
                _ => groups.push((key, vec![item])),
            }
        }
        let groups =
            groups.into_iter().map(|(key, group)| TemplateValue::tuple(vec![key, TemplateValue::list(group)?]));
        TemplateValue::list(groups.collect::<Outcome<_>>()?)
    }

    /// The items of a value, none of one that is not true: `map` and `select` of Jinja take `none` for an empty list.
    fn items_if_true(&mut self, value: &TemplateValue) -> Outcome<Vec<TemplateValue>> {
        if value.is_true() { self.items(value) } else { Ok(Vec::new()) }
    }

    fn map_filter(&mut self, value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        let items = self.items_if_true(value)?;
        self.charge_list(items.len())?;
        if let Some((_, attribute)) = given.named.iter().find(|(name, _)| &**name == "attribute") {
            let default = given.get(usize::MAX, "default");
            let values = items.iter().map(|item| {
                let value = self.path(item, attribute)?;
                Ok(match &default {
                    Some(default) if value.is_undefined() => default.clone(),
                    _ => value,
                })
            });
            return TemplateValue::list(values.collect::<Outcome<_>>()?);
        }
        let name = given.text(0, "filter")?;
        let given = rest_of(given, 1);
        let values = items.into_iter().map(|item| {
            self.charge_steps(1)?;
            self.nested(|machine| machine.apply_filter(&name, item, &given))
        });
        TemplateValue::list(values.collect::<Outcome<_>>()?)
    }

    fn select(&mut self, name: &str, value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        let (attribute, given) = match name {
            "selectattr" | "rejectattr" => (Some(given.need(0, "attribute")?), rest_of(given, 1)),
            _ => (None, rest_of(given, 0)),
        };
        let test: Option<Arc<str>> = match given.get(0, "test") {
            None => None,
            Some(_) => Some(given.text(0, "test")?),
        };
        let given = rest_of(&given, 1);
        let mut kept = Vec::new();
        for item in self.items_if_true(value)? {
            self.charge_steps(1)?;
            let tested = attribute.as_ref().map_or(Ok(item.clone()), |path| self.path(&item, path))?;
            let holds = match &test {
                None => tested.is_true(),
                Some(test) => self.test(&tested, test, &given)?,
            };
            if holds == name.starts_with("select") {
                kept.push(item);
            }
        }
        TemplateValue::list(kept)
    }

    /// Lists of `n` items, or `n` lists.
    fn divide(&mut self, name: &str, value: &TemplateValue, given: &Given) -> Outcome<TemplateValue> {
        let items = self.items(value)?;
        let count = given.integer(0, "count")?.unwrap_or(0);
        check(count > 0, || format!("`{name}` by {count}"))?;
        let fill = given.get(1, "fill_with").filter(|fill| !fill.is_none());
        let count = usize::try_from(count).unwrap_or(usize::MAX >> 1);
        let mut lists: Vec<Vec<TemplateValue>> = Vec::new();
        if name == "batch" {
            self.charge_list(items.len() + 3 * items.len().div_ceil(count))?;
            lists.extend(items.chunks(count).map(<[TemplateValue]>::to_vec));
            if let (Some(fill), Some(last)) = (fill, lists.last_mut()) {
                let missing = count - last.len();
                self.charge_list(missing)?;
                last.resize(count, fill);
            }
        } else {
            self.charge_list(items.len().saturating_add(count.saturating_mul(4)))?;
            let (each, larger) = (items.len() / count, items.len() % count);
            let mut rest = &items[..];
            for at in 0..count {
                let (taken, others) = rest.split_at(each + usize::from(at < larger));
                rest = others;
                let mut list = taken.to_vec();
                if let Some(fill) = &fill
                    && larger > 0
                    && at >= larger
                {
                    list.push(fill.clone());
                }
                lists.push(list);
            }
        }
        TemplateValue::list(lists.into_iter().map(TemplateValue::list).collect::<Outcome<_>>()?)
    }
}

/// The arguments after the first `count`.
fn rest_of(given: &Given, count: usize) -> Given {
    Given { positional: given.positional.iter().skip(count).cloned().collect(), named: given.named.clone() }
}
