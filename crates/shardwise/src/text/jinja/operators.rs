//! What operators do with values: arithmetic, comparison, order.

use std::cmp::Ordering;

use super::ast::{Comparison, Operator};
use super::expressions::Given;
use super::machine::{Machine, Outcome};
use super::value::TemplateValue;
use super::{Problem, check};

/// A number of either type.
#[derive(Clone, Copy)]
enum Number {
    Int(i128),
    Float(f64),
}

impl Number {
    fn of(value: &TemplateValue) -> Option<Number> {
        match value {
            TemplateValue::Bool(value) => Some(Number::Int((*value).into())),
            TemplateValue::Int(value) => Some(Number::Int(*value)),
            TemplateValue::Float(value) => Some(Number::Float(*value)),
            _ => None,
        }
    }

    fn float(self) -> f64 {
        match self {
            Number::Int(value) => value as f64,
            Number::Float(value) => value,
        }
    }
}

/// Compares numbers; NaN is less than all numbers, so that sorting has an order.
fn compare_numbers(left: Number, right: Number) -> Ordering {
    match (left, right) {
        (Number::Int(left), Number::Int(right)) => left.cmp(&right),
        _ => {
            let (left, right) = (left.float(), right.float());
            left.partial_cmp(&right).unwrap_or_else(|| right.is_nan().cmp(&left.is_nan()))
        }
    }
}

fn equal_numbers(left: Number, right: Number) -> bool {
    match (left, right) {
        (Number::Int(left), Number::Int(right)) => left == right,
        _ => left.float() == right.float(),
    }
}

impl Machine<'_> {
    pub(super) fn binary(
        &mut self,
        operator: Operator,
        left: &TemplateValue,
        right: &TemplateValue,
    ) -> Outcome<TemplateValue> {
        if let (Some(left), Some(right)) = (Number::of(left), Number::of(right)) {
            return arithmetic(operator, left, right);
        }
        match (operator, left, right) {
            (Operator::Add, TemplateValue::Text(left), TemplateValue::Text(right)) => {
                self.charge_text(left.len() + right.len())?;
                Ok(TemplateValue::Text([&**left, &**right].concat().into()))
            }
            (Operator::Add, TemplateValue::List(left), TemplateValue::List(right))
                if left.is_tuple == right.is_tuple =>
            {
                self.charge_list(left.items.len() + right.items.len())?;
                let items = [&left.items[..], &right.items[..]].concat();
                if left.is_tuple { TemplateValue::tuple(items) } else { TemplateValue::list(items) }
            }
            (Operator::Multiply, TemplateValue::Text(_) | TemplateValue::List(_), TemplateValue::Int(times)) => {
                self.repeat(left, *times)
            }
            (Operator::Multiply, TemplateValue::Int(times), TemplateValue::Text(_) | TemplateValue::List(_)) => {
                self.repeat(right, *times)
            }
            (Operator::Remainder, TemplateValue::Text(format), _) => {
                let given = match right {
                    TemplateValue::List(list) if list.is_tuple => {
                        self.charge_list(list.items.len())?;
                        Given { positional: list.items.clone(), named: Vec::new() }
                    }
                    other => Given::one(other.clone()),
                };
                self.printf(format, &given)
            }
            _ => {
                let problem = format!("`{}` of {} and {}", symbol(operator), left.kind(), right.kind());
                Err(Problem::new(problem))
            }
        }
    }

    fn repeat(&mut self, of: &TemplateValue, times: i128) -> Outcome<TemplateValue> {
        let times = usize::try_from(times.clamp(0, i128::from(u32::MAX))).unwrap_or(0);
        match of {
            TemplateValue::Text(text) => {
                self.charge_text(text.len().saturating_mul(times))?;
                Ok(TemplateValue::text(&text.repeat(times)))
            }
            TemplateValue::List(list) => {
                self.charge_list(list.items.len().saturating_mul(times))?;
                let items = list.items.iter().cycle().take(list.items.len() * times).cloned().collect();
                if list.is_tuple { TemplateValue::tuple(items) } else { TemplateValue::list(items) }
            }
            _ => Ok(TemplateValue::Undefined),
        }
    }

    // ---- comparisons

    pub(super) fn compare(
        &mut self,
        comparison: Comparison,
        left: &TemplateValue,
        right: &TemplateValue,
    ) -> Outcome<bool> {
        Ok(match comparison {
            Comparison::Equal => self.equal(left, right)?,
            Comparison::NotEqual => !self.equal(left, right)?,
            Comparison::Less => self.order(left, right)? == Ordering::Less,
            Comparison::LessEqual => self.order(left, right)? != Ordering::Greater,
            Comparison::Greater => self.order(left, right)? == Ordering::Greater,
            Comparison::GreaterEqual => self.order(left, right)? != Ordering::Less,
            Comparison::In => self.contains(right, left)?,
            Comparison::NotIn => !self.contains(right, left)?,
        })
    }

    pub(super) fn equal(&mut self, left: &TemplateValue, right: &TemplateValue) -> Outcome<bool> {
        self.charge_steps(1)?;
        if let (Some(left), Some(right)) = (Number::of(left), Number::of(right)) {
            return Ok(equal_numbers(left, right));
        }
        match (left, right) {
            (TemplateValue::Undefined, TemplateValue::Undefined) | (TemplateValue::None, TemplateValue::None) => {
                Ok(true)
            }
            (TemplateValue::Text(left), TemplateValue::Text(right)) => {
                self.charge_read(left.len().min(right.len()))?;
                Ok(left == right)
            }
            (TemplateValue::List(left), TemplateValue::List(right)) => {
                if left.is_tuple != right.is_tuple || left.items.len() != right.items.len() {
                    return Ok(false);
                }
                for (left, right) in left.items.iter().zip(&right.items) {
                    if !self.nested(|machine| machine.equal(left, right))? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            (TemplateValue::Map(left), TemplateValue::Map(right)) => {
                if left.entries.len() != right.entries.len() {
                    return Ok(false);
                }
                for (key, value) in &left.entries {
                    let mut found = None;
                    for (other, value) in &right.entries {
                        if self.nested(|machine| machine.equal(key, other))? {
                            found = Some(value);
                            break;
                        }
                    }
                    let Some(other) = found else { return Ok(false) };
                    if !self.nested(|machine| machine.equal(value, other))? {
                        return Ok(false);
                    }
                }
                Ok(true)
            }
            (TemplateValue::Namespace(left), TemplateValue::Namespace(right))
            | (TemplateValue::Macro(left), TemplateValue::Macro(right))
            | (TemplateValue::Loop(left), TemplateValue::Loop(right)) => Ok(left == right),
            (TemplateValue::Function(left), TemplateValue::Function(right)) => Ok(left == right),
            _ => Ok(false),
        }
    }

    pub(super) fn order(&mut self, left: &TemplateValue, right: &TemplateValue) -> Outcome<Ordering> {
        self.charge_steps(1)?;
        if let (Some(left), Some(right)) = (Number::of(left), Number::of(right)) {
            return Ok(compare_numbers(left, right));
        }
        match (left, right) {
            (TemplateValue::Text(left), TemplateValue::Text(right)) => {
                self.charge_read(left.len().min(right.len()))?;
                Ok(left.cmp(right))
            }
            (TemplateValue::List(left), TemplateValue::List(right)) => {
                for (left, right) in left.items.iter().zip(&right.items) {
                    let order = self.nested(|machine| machine.order(left, right))?;
                    if order != Ordering::Equal {
                        return Ok(order);
                    }
                }
                Ok(left.items.len().cmp(&right.items.len()))
            }
            _ => Err(Problem::new(format!("{} and {} have no order", left.kind(), right.kind()))),
        }
    }

    pub(super) fn contains(&mut self, container: &TemplateValue, value: &TemplateValue) -> Outcome<bool> {
        match (container, value) {
            (TemplateValue::Undefined, _) => Ok(false),
            (TemplateValue::Text(text), TemplateValue::Text(part)) => {
                self.charge_read(text.len() + part.len())?;
                Ok(text.contains(&**part))
            }
            (TemplateValue::List(list), _) => {
                for item in &list.items {
                    if self.equal(item, value)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            (TemplateValue::Map(map), _) => {
                for (key, _) in &map.entries {
                    if self.equal(key, value)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            (TemplateValue::Namespace(index), TemplateValue::Text(name)) => {
                Ok(self.namespaces[*index].iter().any(|(own, _)| own == name))
            }
            _ => Err(Problem::new(format!("`in` of {} in {}", value.kind(), container.kind()))),
        }
    }

    /// Sorts values by their keys, those of equal keys in their order.
    pub(super) fn sorted(
        &mut self,
        mut items: Vec<(TemplateValue, TemplateValue)>,
        reverse: bool,
    ) -> Outcome<Vec<TemplateValue>> {
        // The library's sort may panic if comparisons contradict each other, and these can fail. Runs of doubled length are merged.
        self.charge_list(4 * items.len())?;
        let mut width = 1;
        while width < items.len() {
            let mut merged = Vec::with_capacity(items.len());
            for run in items.chunks(2 * width) {
                let (left, right) = run.split_at(width.min(run.len()));
                let (mut l, mut r) = (0, 0);
                while l < left.len() || r < right.len() {
                    let takes_right = match (left.get(l), right.get(r)) {
                        (Some(left), Some(right)) => {
                            let order = self.order(&left.0, &right.0)?;
                            order == if reverse { Ordering::Less } else { Ordering::Greater }
                        }
                        (None, _) => true,
                        (_, None) => false,
                    };
                    let next = if takes_right { &right[r] } else { &left[l] };
                    (l, r) = if takes_right { (l, r + 1) } else { (l + 1, r) };
                    merged.push(next.clone());
                }
            }
            items = merged;
            width *= 2;
        }
        Ok(items.into_iter().map(|(_, value)| value).collect())
    }
}

fn symbol(operator: Operator) -> &'static str {
    match operator {
        Operator::Add => "+",
        Operator::Subtract => "-",
        Operator::Multiply => "*",
        Operator::Divide => "/",
        Operator::FloorDivide => "//",
        Operator::Remainder => "%",
        Operator::Power => "**",
    }
}

fn arithmetic(operator: Operator, left: Number, right: Number) -> Outcome<TemplateValue> {
    let divides = matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Remainder);
    check(!divides || right.float() != 0.0, || format!("`{}` by 0", symbol(operator)))?;
    if let (Number::Int(left), Number::Int(right)) = (left, right) {
        let whole = match operator {
            Operator::Add => left.checked_add(right),
            Operator::Subtract => left.checked_sub(right),
            Operator::Multiply => left.checked_mul(right),
            Operator::Divide => return Ok(TemplateValue::Float(left as f64 / right as f64)),
            Operator::FloorDivide => left.checked_div_euclid(right).and_then(|quotient| {
                // Euclid rounds towards zero or away from it by the sign of the divisor; Python rounds down.
                if right < 0 && left.rem_euclid(right) != 0 { quotient.checked_sub(1) } else { Some(quotient) }
            }),
            Operator::Remainder => left
                .checked_rem(right)
                .map(|rest| if rest != 0 && (rest < 0) != (right < 0) { rest + right } else { rest }),
            Operator::Power if right < 0 => {
                check(left != 0, || "a negative power of 0".to_string())?;
                return Ok(TemplateValue::Float((left as f64).powf(right as f64)));
            }
            Operator::Power => u32::try_from(right).ok().and_then(|power| left.checked_pow(power)),
        };
        return whole
            .map(TemplateValue::Int)
            .ok_or_else(|| Problem::new(format!("`{}` beyond 128 bits", symbol(operator))));
    }
    let (left, right) = (left.float(), right.float());
    Ok(TemplateValue::Float(match operator {
        Operator::Add => left + right,
        Operator::Subtract => left - right,
        Operator::Multiply => left * right,
        Operator::Divide => left / right,
        Operator::FloorDivide => (left / right).floor(),
        Operator::Remainder => left - right * (left / right).floor(),
        Operator::Power => left.powf(right),
    }))
}
