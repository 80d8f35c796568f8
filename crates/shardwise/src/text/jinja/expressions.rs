//! Evaluates expressions and calls.

use std::sync::Arc;

use super::ast::{Arguments, Expr, Kind};
use super::machine::{Machine, Outcome};
use super::value::TemplateValue;
use super::{Problem, check};

/// Numbers of a range, as in the sandbox of Jinja.
const MOST_NUMBERS: i128 = 100_000;

/// Evaluated arguments of a call.
pub(super) struct Given {
    pub(super) positional: Vec<TemplateValue>,
    pub(super) named: Vec<(Arc<str>, TemplateValue)>,
}

impl Given {
    pub(super) fn none() -> Self {
        Given { positional: Vec::new(), named: Vec::new() }
    }

    pub(super) fn one(value: TemplateValue) -> Self {
        Given { positional: vec![value], named: Vec::new() }
    }

    /// The argument in a place or of a name.
    pub(super) fn get(&self, at: usize, name: &str) -> Option<TemplateValue> {
        let named = || self.named.iter().find(|(own, _)| &**own == name).map(|(_, value)| value.clone());
        self.positional.get(at).cloned().or_else(named)
    }

    /// The argument in a place or of a name, which must be there.
    pub(super) fn need(&self, at: usize, name: &str) -> Outcome<TemplateValue> {
        self.get(at, name).ok_or_else(|| Problem::new(format!("a call without its argument `{name}`")))
    }

    pub(super) fn text(&self, at: usize, name: &str) -> Outcome<Arc<str>> {
        match self.need(at, name)? {
            TemplateValue::Text(text) => Ok(text),
            other => Err(Problem::new(format!("the argument `{name}` is {} and should be a text", other.kind()))),
        }
    }

    pub(super) fn integer(&self, at: usize, name: &str) -> Outcome<Option<i128>> {
        match self.get(at, name) {
            None | Some(TemplateValue::None | TemplateValue::Undefined) => Ok(None),
            Some(TemplateValue::Int(value)) => Ok(Some(value)),
            Some(TemplateValue::Bool(value)) => Ok(Some(value.into())),
            Some(TemplateValue::Float(value)) if value.fract() == 0.0 => Ok(Some(value as i128)),
            Some(other) => {
                Err(Problem::new(format!("the argument `{name}` is {} and should be an integer", other.kind())))
            }
        }
    }

    pub(super) fn flag(&self, at: usize, name: &str) -> bool {
        self.get(at, name).is_some_and(|value| value.is_true())
    }
}

impl<'t> Machine<'t> {
    pub(super) fn value(&mut self, expr: &'t Expr) -> Outcome<TemplateValue> {
        self.charge_steps(1)?;
        match &expr.kind {
            Kind::Constant(value) => Ok(value.clone()),
            Kind::Name(name) => self.lookup(name),
            _ => self.nested(|machine| machine.compound(expr)).map_err(|problem| problem.at(expr.line)),
        }
    }

    fn values(&mut self, exprs: &'t [Expr]) -> Outcome<Vec<TemplateValue>> {
        self.charge_list(exprs.len())?;
        exprs.iter().map(|expr| self.value(expr)).collect()
    }

    fn compound(&mut self, expr: &'t Expr) -> Outcome<TemplateValue> {
        match &expr.kind {
            Kind::Constant(value) => Ok(value.clone()),
            Kind::Name(name) => self.lookup(name),
            Kind::Tuple(items) => TemplateValue::tuple(self.values(items)?),
            Kind::List(items) => TemplateValue::list(self.values(items)?),
            Kind::Map(entries) => self.map(entries),
            Kind::Attribute(of, name) => {
                let of = self.value(of)?;
                self.attribute(&of, name)
            }
            Kind::Item(parts) => {
                let (of, index) = (self.value(&parts.0)?, self.value(&parts.1)?);
                self.item(&of, &index)
            }
            Kind::Slice(parts) => self.slice_expression(&parts.0, &parts.1),
            Kind::Call(callee, arguments) => self.call(callee, arguments, None),
            Kind::Filter(operand, invocation) => {
                let value = operand.as_ref().map_or(Ok(TemplateValue::Undefined), |operand| self.value(operand))?;
                self.filter(value, invocation)
            }
            Kind::Test(operand, invocation) => {
                let value = self.value(operand)?;
                let given = self.given(&invocation.arguments)?;
                Ok(self.test(&value, &invocation.name, &given)?.into())
            }
            Kind::Not(operand) => Ok((!self.value(operand)?.is_true()).into()),
            Kind::Negative(operand) => match self.value(operand)? {
                TemplateValue::Float(value) => Ok(TemplateValue::Float(-value)),
                other => self.binary(super::ast::Operator::Subtract, &TemplateValue::Int(0), &other),
            },
            Kind::Positive(operand) => {
                let value = self.value(operand)?;
                self.binary(super::ast::Operator::Add, &TemplateValue::Int(0), &value)
            }
            Kind::Binary(operator, operands) => {
                let (left, right) = (self.value(&operands.0)?, self.value(&operands.1)?);
                self.binary(*operator, &left, &right)
            }
            Kind::And(operands) => {
                let left = self.value(&operands.0)?;
                if left.is_true() { self.value(&operands.1) } else { Ok(left) }
            }
            Kind::Or(operands) => {
                let left = self.value(&operands.0)?;
                if left.is_true() { Ok(left) } else { self.value(&operands.1) }
            }
            Kind::Concat(parts) => {
                let mut text = String::new();
                for part in parts {
                    let value = self.value(part)?;
                    self.write(&mut text, &value)?;
                }
                self.text(&text)
            }
            Kind::Compare(parts) => {
                let mut left = self.value(&parts.0)?;
                for (comparison, right) in &parts.1 {
                    let right = self.value(right)?;
                    if !self.compare(*comparison, &left, &right)? {
                        return Ok(false.into());
                    }
                    left = right;
                }
                Ok(true.into())
            }
            Kind::Condition(parts) => {
                if self.value(&parts.0)?.is_true() {
                    return self.value(&parts.1);
                }
                parts.2.as_ref().map_or(Ok(TemplateValue::Undefined), |otherwise| self.value(otherwise))
            }
        }
    }

    fn map(&mut self, entries: &'t [(Expr, Expr)]) -> Outcome<TemplateValue> {
        self.charge_list(2 * entries.len())?;
        let mut result = Vec::with_capacity(entries.len());
        for (key, value) in entries {
            let (key, value) = (self.value(key)?, self.value(value)?);
            self.insert(&mut result, key, value)?;
        }
        TemplateValue::map(result)
    }

    /// Sets a key of a dictionary that is being built.
    pub(super) fn insert(
        &mut self,
        entries: &mut Vec<(TemplateValue, TemplateValue)>,
        key: TemplateValue,
        value: TemplateValue,
    ) -> Outcome<()> {
        for entry in entries.iter_mut() {
            if self.equal(&entry.0, &key)? {
                entry.1 = value;
                return Ok(());
            }
        }
        entries.push((key, value));
        Ok(())
    }

    // ---- parts of values

    pub(super) fn attribute(&mut self, of: &TemplateValue, name: &str) -> Outcome<TemplateValue> {
        match of {
            TemplateValue::Undefined => Err(Problem::new(format!("`{name}` of an undefined value"))),
            TemplateValue::Map(map) => {
                self.charge_steps(map.entries.len() as u64 / 16)?;
                Ok(of.field(name).cloned().unwrap_or_default())
            }
            TemplateValue::Namespace(index) => {
                let fields = &self.namespaces[*index];
                let value = fields.iter().find(|(own, _)| &**own == name).map(|(_, value)| value.clone());
                let count = fields.len();
                self.charge_steps(count as u64 / 16)?;
                Ok(value.unwrap_or_default())
            }
            TemplateValue::Loop(number) => self.loop_attribute(*number, name),
            _ => Ok(TemplateValue::Undefined),
        }
    }

    fn loop_attribute(&mut self, number: usize, name: &str) -> Outcome<TemplateValue> {
        let running = self.loop_at(number)?;
        let (at, count) = (running.at, running.items.len());
        Ok(match name {
            "index" => (at + 1).into(),
            "index0" => at.into(),
            "revindex" => (count - at).into(),
            "revindex0" => (count - at - 1).into(),
            "first" => (at == 0).into(),
            "last" => (at + 1 == count).into(),
            "length" => count.into(),
            "depth" => (running.depth + 1).into(),
            "depth0" => running.depth.into(),
            "previtem" => at.checked_sub(1).map(|at| running.items[at].clone()).unwrap_or_default(),
            "nextitem" => running.items.get(at + 1).cloned().unwrap_or_default(),
            _ => TemplateValue::Undefined,
        })
    }

    pub(super) fn item(&mut self, of: &TemplateValue, index: &TemplateValue) -> Outcome<TemplateValue> {
        match (of, index) {
            (TemplateValue::Map(map), _) => {
                if let Some(name) = index.as_str() {
                    return self.attribute(of, name);
                }
                for (key, value) in &map.entries {
                    if self.equal(key, index)? {
                        return Ok(value.clone());
                    }
                }
                Ok(TemplateValue::Undefined)
            }
            (TemplateValue::List(list), TemplateValue::Int(index)) => {
                Ok(place(*index, list.items.len()).map(|at| list.items[at].clone()).unwrap_or_default())
            }
            (TemplateValue::Text(text), TemplateValue::Int(index)) => {
                self.charge_read(2 * text.len())?;
                let found = place(*index, text.chars().count()).and_then(|at| text.chars().nth(at));
                match found {
                    Some(c) => self.text(c.encode_utf8(&mut [0; 4])),
                    None => Ok(TemplateValue::Undefined),
                }
            }
            (_, TemplateValue::Text(name)) => self.attribute(of, name),
            (TemplateValue::Undefined, _) => Err(Problem::new("an item of an undefined value")),
            _ => Ok(TemplateValue::Undefined),
        }
    }

    fn slice_expression(&mut self, of: &'t Expr, parts: &'t [Option<Expr>; 3]) -> Outcome<TemplateValue> {
        let of = self.value(of)?;
        let mut bounds = [None; 3];
        for (bound, part) in bounds.iter_mut().zip(parts) {
            *bound = match part.as_ref().map_or(Ok(TemplateValue::None), |part| self.value(part))? {
                TemplateValue::None => None,
                TemplateValue::Int(value) => Some(value),
                other => return Err(Problem::new(format!("a slice with {} as a bound", other.kind()))),
            };
        }
        self.slice(&of, bounds)
    }

    /// The values in a value that a loop goes through.
    pub(super) fn items(&mut self, of: &TemplateValue) -> Outcome<Vec<TemplateValue>> {
        match of {
            TemplateValue::Undefined => Ok(Vec::new()),
            TemplateValue::List(list) => {
                self.charge_list(list.items.len())?;
                Ok(list.items.clone())
            }
            TemplateValue::Map(map) => {
                self.charge_list(map.entries.len())?;
                Ok(map.entries.iter().map(|(key, _)| key.clone()).collect())
            }
            TemplateValue::Text(text) => {
                self.charge_list(2 * text.len())?;
                Ok(text.chars().map(|c| TemplateValue::text(c.encode_utf8(&mut [0; 4]))).collect())
            }
            other => Err(Problem::new(format!("{} cannot be iterated over", other.kind()))),
        }
    }

    pub(super) fn length(&mut self, of: &TemplateValue) -> Outcome<usize> {
        match of {
            TemplateValue::Undefined => Ok(0),
            TemplateValue::Text(text) => {
                self.charge_read(text.len())?;
                Ok(text.chars().count())
            }
            TemplateValue::List(list) => Ok(list.items.len()),
            TemplateValue::Map(map) => Ok(map.entries.len()),
            other => Err(Problem::new(format!("{} has no length", other.kind()))),
        }
    }

    // ---- calls

    pub(super) fn given(&mut self, arguments: &'t Arguments) -> Outcome<Given> {
        let positional = if arguments.positional.is_empty() { Vec::new() } else { self.values(&arguments.positional)? };
        if !arguments.named.is_empty() {
            self.charge_list(2 * arguments.named.len())?;
        }
        let named = arguments.named.iter().map(|(name, expr)| Ok((name.clone(), self.value(expr)?)));
        Ok(Given { named: named.collect::<Outcome<_>>()?, positional })
    }

    pub(super) fn call_with_caller(&mut self, call: &'t Expr, caller: TemplateValue) -> Outcome<TemplateValue> {
        let Kind::Call(callee, arguments) = &call.kind else { return Ok(TemplateValue::Undefined) };
        let value = self.nested(|machine| machine.call(callee, arguments, Some(caller)));
        value.map_err(|problem| problem.at(call.line))
    }

    fn call(
        &mut self,
        callee: &'t Expr,
        arguments: &'t Arguments,
        caller: Option<TemplateValue>,
    ) -> Outcome<TemplateValue> {
        if let Kind::Attribute(of, name) = &callee.kind {
            let of = self.value(of)?;
            let field = match of {
                TemplateValue::Map(_) | TemplateValue::Namespace(_) => self.attribute(&of, name)?,
                _ => TemplateValue::Undefined,
            };
            if !matches!(field, TemplateValue::Macro(_) | TemplateValue::Function(_) | TemplateValue::Loop(_)) {
                let given = self.given(arguments)?;
                return self.method(&of, name, &given);
            }
            return self.call_value(&field, name, arguments, caller);
        }
        let value = self.value(callee)?;
        let name = if let Kind::Name(name) = &callee.kind { &**name } else { "" };
        self.call_value(&value, name, arguments, caller)
    }

    fn call_value(
        &mut self,
        callee: &TemplateValue,
        name: &str,
        arguments: &'t Arguments,
        caller: Option<TemplateValue>,
    ) -> Outcome<TemplateValue> {
        let mut given = self.given(arguments)?;
        match callee {
            TemplateValue::Macro(number) => {
                given.named.extend(caller.map(|caller| (Arc::from("caller"), caller)));
                self.call_macro(*number, given.positional, given.named)
            }
            TemplateValue::Loop(number) => {
                let iterable = given.need(0, "items")?;
                self.call_loop(*number, &iterable)
            }
            TemplateValue::Function(name) => self.function(name, given),
            TemplateValue::Undefined => Err(Problem::new(format!("`{name}` is called and is not defined"))),
            other => Err(Problem::new(format!("{} is called and is not a function", other.kind()))),
        }
    }

    fn function(&mut self, name: &str, given: Given) -> Outcome<TemplateValue> {
        match name {
            "range" => self.range(&given),
            "raise_exception" => {
                let message = given.need(0, "message")?;
                let mut text = String::new();
                self.write(&mut text, &message)?;
                Err(Problem::new(text))
            }
            "strftime_now" => {
                let format = given.text(0, "format")?;
                // A directive has two bytes and at most nine characters.
                self.charge_text(9 * format.len())?;
                Ok(TemplateValue::text(&crate::text::strftime::strftime_now(&format)))
            }
            _ => {
                let mut entries = Vec::new();
                if let Some(TemplateValue::Map(map)) = given.positional.first() {
                    self.charge_list(2 * map.entries.len())?;
                    entries.clone_from(&map.entries);
                }
                for (name, value) in given.named {
                    let name = self.text(&name)?;
                    self.insert(&mut entries, name, value)?;
                }
                if name == "dict" {
                    return TemplateValue::map(entries);
                }
                self.charge_list(2 * entries.len() + 1)?;
                let fields = entries.into_iter().filter_map(|(key, value)| match key {
                    TemplateValue::Text(name) => Some((name, value)),
                    _ => None,
                });
                self.namespaces.push(fields.collect());
                Ok(TemplateValue::Namespace(self.namespaces.len() - 1))
            }
        }
    }

    fn range(&mut self, given: &Given) -> Outcome<TemplateValue> {
        let number = |at: usize| given.integer(at, "stop");
        let (start, stop) = match (number(0)?, number(1)?) {
            (Some(start), Some(stop)) => (start, stop),
            (Some(stop), None) => (0, stop),
            _ => return Err(Problem::new("`range` without an end")),
        };
        let step = number(2)?.unwrap_or(1);
        check(step != 0, || "`range` with steps of 0".to_string())?;
        let (span, width) = match step > 0 {
            true => (stop.saturating_sub(start), step),
            false => (start.saturating_sub(stop), step.saturating_neg()),
        };
        let count = span.max(0) / width + i128::from(span.max(0) % width != 0);
        check(count <= MOST_NUMBERS, || format!("`range` of {count} numbers, more than {MOST_NUMBERS}"))?;
        self.charge_list(count as usize)?;
        TemplateValue::list((0..count).map(|at| TemplateValue::Int(start + at * step)).collect())
    }
}

/// The place of an index, which counts from the end if it is negative.
fn place(index: i128, count: usize) -> Option<usize> {
    let at = if index < 0 { index.checked_add(count as i128)? } else { index };
    usize::try_from(at).ok().filter(|&at| at < count)
}

impl<'t> Machine<'t> {
    /// A slice with Python's rules.
    fn slice(&mut self, of: &TemplateValue, [start, stop, step]: [Option<i128>; 3]) -> Outcome<TemplateValue> {
        let count = match of {
            TemplateValue::Text(_) | TemplateValue::List(_) => self.length(of)? as i128,
            TemplateValue::Undefined | TemplateValue::None => return TemplateValue::list(Vec::new()),
            other => return Err(Problem::new(format!("a slice of {}", other.kind()))),
        };
        let step = step.unwrap_or(1);
        check(step != 0, || "a slice with steps of 0".to_string())?;
        let (lowest, highest) = if step > 0 { (0, count) } else { (-1, count - 1) };
        let bound = |value: Option<i128>, default: i128| match value {
            None => default,
            Some(value) if value < 0 => value.saturating_add(count).max(lowest),
            Some(value) => value.min(highest),
        };
        let (first, last) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
        let (start, stop) = (bound(start, first), bound(stop, last));
        let span = if step > 0 { stop - start } else { start - stop };
        let width = step.saturating_abs();
        let taken = if span > 0 { (span - 1) / width + 1 } else { 0 };
        let places = (0..taken).map(|at| (start + at * step) as usize);
        match of {
            TemplateValue::Text(text) if step == 1 => {
                let mut ends = text.char_indices().map(|(at, _)| at).chain([text.len()]).skip(start as usize);
                let from = ends.next().unwrap_or(text.len());
                let to = if taken == 0 { from } else { ends.nth(taken as usize - 1).unwrap_or(text.len()) };
                self.charge_read(text.len())?;
                self.text(&text[from..to])
            }
            TemplateValue::Text(text) => {
                self.charge_list(text.len())?;
                let chars: Vec<char> = text.chars().collect();
                let taken: String = places.map(|at| chars[at]).collect();
                self.text(&taken)
            }
            TemplateValue::List(list) => {
                self.charge_list(taken as usize)?;
                let taken = places.map(|at| list.items[at].clone()).collect();
                if list.is_tuple { TemplateValue::tuple(taken) } else { TemplateValue::list(taken) }
            }
            _ => Ok(TemplateValue::Undefined),
        }
    }
}
