//! Expressions, with the precedence of Jinja's operators: the weakest first.

use std::sync::Arc;

use super::super::ast::{Arguments, Comparison, Expr, Invocation, Kind, Operator};
use super::super::lexer::Token;
use super::super::value::TemplateValue;
use super::super::{Problem, check};
use super::{Parsed, Parser};

impl Parser<'_> {
    /// An expression, or several with commas between them. Without `conditions`, `if` belongs to the tag.
    pub(super) fn tuple(&mut self, conditions: bool) -> Parsed<Expr> {
        let one = |parser: &mut Self| if conditions { parser.expression() } else { parser.nested(Self::or) };
        let first = one(self)?;
        if !self.is(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.take(",") {
            let ended = matches!(self.peek(), None | Some(Token::PrintEnd | Token::TagEnd)) || self.is(")");
            if ended || self.is_name("recursive") {
                break;
            }
            items.push(one(self)?);
        }
        let levels = items.iter().map(|item| item.levels).max().unwrap_or(0);
        self.expr(Kind::Tuple(items), levels)
    }

    pub(super) fn expression(&mut self) -> Parsed<Expr> {
        self.nested(|parser| {
            let mut value = parser.or()?;
            while parser.take_name("if") {
                let condition = parser.or()?;
                let otherwise = if parser.take_name("else") { Some(parser.expression()?) } else { None };
                let levels = value.levels.max(condition.levels).max(otherwise.as_ref().map_or(0, |expr| expr.levels));
                value = parser.expr(Kind::Condition(Box::new((condition, value, otherwise))), levels)?;
            }
            Ok(value)
        })
    }

    pub(super) fn pair(&self, kind: fn(Box<(Expr, Expr)>) -> Kind, left: Expr, right: Expr) -> Parsed<Expr> {
        let levels = left.levels.max(right.levels);
        self.expr(kind(Box::new((left, right))), levels)
    }

    pub(super) fn or(&mut self) -> Parsed<Expr> {
        let mut left = self.and()?;
        while self.take_name("or") {
            let right = self.and()?;
            left = self.pair(Kind::Or, left, right)?;
        }
        Ok(left)
    }

    pub(super) fn and(&mut self) -> Parsed<Expr> {
        let mut left = self.not()?;
        while self.take_name("and") {
            let right = self.not()?;
            left = self.pair(Kind::And, left, right)?;
        }
        Ok(left)
    }

    pub(super) fn not(&mut self) -> Parsed<Expr> {
        if self.take_name("not") {
            let operand = self.nested(Self::not)?;
            let levels = operand.levels;
            return self.expr(Kind::Not(Box::new(operand)), levels);
        }
        self.comparison()
    }

    pub(super) fn comparison(&mut self) -> Parsed<Expr> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let comparison = match self.peek() {
                Some(Token::Operator("==")) => Comparison::Equal,
                Some(Token::Operator("!=")) => Comparison::NotEqual,
                Some(Token::Operator("<")) => Comparison::Less,
                Some(Token::Operator("<=")) => Comparison::LessEqual,
                Some(Token::Operator(">")) => Comparison::Greater,
                Some(Token::Operator(">=")) => Comparison::GreaterEqual,
                Some(Token::Name("in")) => Comparison::In,
                Some(Token::Name("not")) if matches!(self.tokens.as_slice().get(1), Some((Token::Name("in"), _))) => {
                    self.next()?;
                    Comparison::NotIn
                }
                _ => break,
            };
            self.next()?;
            rest.push((comparison, self.sum()?));
        }
        if rest.is_empty() {
            return Ok(first);
        }
        let levels = rest.iter().map(|(_, expr)| expr.levels).max().unwrap_or(0).max(first.levels);
        self.expr(Kind::Compare(Box::new((first, rest))), levels)
    }

    pub(super) fn binary(
        &mut self,
        operators: &[(&str, Operator)],
        operand: fn(&mut Self) -> Parsed<Expr>,
    ) -> Parsed<Expr> {
        let mut left = operand(self)?;
        loop {
            let Some((_, operator)) = operators.iter().find(|(text, _)| self.is(text)) else { return Ok(left) };
            self.next()?;
            let right = operand(self)?;
            let levels = left.levels.max(right.levels);
            left = self.expr(Kind::Binary(*operator, Box::new((left, right))), levels)?;
        }
    }

    pub(super) fn sum(&mut self) -> Parsed<Expr> {
        self.binary(&[("+", Operator::Add), ("-", Operator::Subtract)], Self::concat)
    }

    pub(super) fn concat(&mut self) -> Parsed<Expr> {
        let first = self.product()?;
        if !self.is("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.take("~") {
            parts.push(self.product()?);
        }
        let levels = parts.iter().map(|part| part.levels).max().unwrap_or(0);
        self.expr(Kind::Concat(parts), levels)
    }

    pub(super) fn product(&mut self) -> Parsed<Expr> {
        let operators = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("//", Operator::FloorDivide),
            ("%", Operator::Remainder),
        ];
        self.binary(&operators, |parser| parser.binary(&[("**", Operator::Power)], |parser| parser.unary(true)))
    }

    pub(super) fn unary(&mut self, filters: bool) -> Parsed<Expr> {
        let sign: Option<fn(Box<Expr>) -> Kind> = if self.take("-") {
            Some(Kind::Negative)
        } else if self.take("+") {
            Some(Kind::Positive)
        } else {
            None
        };
        let operand = match sign {
            Some(kind) => {
                let operand = self.nested(|parser| parser.unary(false))?;
                let levels = operand.levels;
                self.expr(kind(Box::new(operand)), levels)?
            }
            None => self.primary()?,
        };
        let operand = self.postfix(operand)?;
        if filters { self.filters(operand) } else { Ok(operand) }
    }

    pub(super) fn primary(&mut self) -> Parsed<Expr> {
        let constant = match self.peek() {
            Some(Token::Name(name)) => match *name {
                "true" | "True" => TemplateValue::Bool(true),
                "false" | "False" => TemplateValue::Bool(false),
                "none" | "None" => TemplateValue::None,
                "in" | "is" | "and" | "or" | "not" | "if" | "else" => return Err(self.unexpected("an expression")),
                name => {
                    let name = Arc::from(name);
                    self.next()?;
                    return self.expr(Kind::Name(name), 0);
                }
            },
            Some(Token::Text(_)) => {
                let mut all = String::new();
                while let Some(Token::Text(text)) = self.peek() {
                    all += text;
                    self.next()?;
                }
                return self.expr(Kind::Constant(TemplateValue::text(&all)), 0);
            }
            Some(Token::Int(number)) => TemplateValue::Int(*number),
            Some(Token::Float(number)) => TemplateValue::Float(*number),
            Some(Token::Operator("(")) => {
                self.next()?;
                if self.take(")") {
                    return self.expr(Kind::Tuple(Vec::new()), 0);
                }
                let inner = self.tuple(true)?;
                self.expect(")")?;
                return Ok(inner);
            }
            Some(Token::Operator("[")) => {
                self.next()?;
                let items = self.items("]", Self::expression)?;
                let levels = items.iter().map(|item| item.levels).max().unwrap_or(0);
                return self.expr(Kind::List(items), levels);
            }
            Some(Token::Operator("{")) => {
                self.next()?;
                let entries = self.items("}", |parser| {
                    let key = parser.expression()?;
                    parser.expect(":")?;
                    Ok((key, parser.expression()?))
                })?;
                let levels = entries.iter().map(|(key, value)| key.levels.max(value.levels)).max().unwrap_or(0);
                return self.expr(Kind::Map(entries), levels);
            }
            _ => return Err(self.unexpected("an expression")),
        };
        self.next()?;
        self.expr(Kind::Constant(constant), 0)
    }

    /// What is between commas, up to `end`.
    pub(super) fn items<T>(&mut self, end: &str, item: impl Fn(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        while !self.take(end) {
            if !items.is_empty() {
                self.expect(",")?;
                if self.take(end) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        Ok(items)
    }

    pub(super) fn postfix(&mut self, mut value: Expr) -> Parsed<Expr> {
        loop {
            let levels = value.levels;
            value = if self.take(".") {
                match self.peek() {
                    Some(Token::Int(index)) => {
                        let index = TemplateValue::Int(*index);
                        self.next()?;
                        let index = self.expr(Kind::Constant(index), 0)?;
                        self.expr(Kind::Item(Box::new((value, index))), levels)?
                    }
                    _ => {
                        let name = self.name()?;
                        self.expr(Kind::Attribute(Box::new(value), name), levels)?
                    }
                }
            } else if self.take("[") {
                self.subscript(value)?
            } else if self.take("(") {
                let arguments = self.arguments()?;
                let levels = levels.max(arguments.levels());
                self.expr(Kind::Call(Box::new(value), Box::new(arguments)), levels)?
            } else {
                return Ok(value);
            };
        }
    }

    pub(super) fn subscript(&mut self, value: Expr) -> Parsed<Expr> {
        let mut bounds = [None, None, None];
        let mut at = 0;
        while !self.take("]") {
            if self.take(":") {
                at += 1;
                check(at < 3, || "syntax error: a slice with more than three parts".to_string())?;
            } else if bounds[at].is_none() {
                bounds[at] = Some(self.expression()?);
            } else {
                return Err(self.unexpected("`]`"));
            }
        }
        let parts = bounds.iter().flatten().map(|expr| expr.levels).max().unwrap_or(0);
        let levels = value.levels.max(parts);
        if at > 0 {
            return self.expr(Kind::Slice(Box::new((value, bounds))), levels);
        }
        let [Some(index), ..] = bounds else { return Err(Problem::new("syntax error: `[]` without an index")) };
        self.expr(Kind::Item(Box::new((value, index))), levels)
    }

    /// Arguments after the opening bracket.
    pub(super) fn arguments(&mut self) -> Parsed<Arguments> {
        let mut arguments = Arguments::default();
        while !self.take(")") {
            if !arguments.positional.is_empty() || !arguments.named.is_empty() {
                self.expect(",")?;
                if self.take(")") {
                    break;
                }
            }
            let named = match self.tokens.as_slice() {
                [(Token::Name(name), _), (Token::Operator("="), _), ..] => Some(Arc::from(*name)),
                _ => None,
            };
            match named {
                Some(name) => {
                    self.next()?;
                    self.next()?;
                    arguments.named.push((name, self.expression()?));
                }
                None => {
                    let problem = || "syntax error: an argument without a name after one with a name".to_string();
                    check(arguments.named.is_empty(), problem)?;
                    arguments.positional.push(self.expression()?);
                }
            }
        }
        Ok(arguments)
    }

    /// The name of a filter or test, with its arguments in brackets.
    pub(super) fn invocation(&mut self) -> Parsed<Invocation> {
        let mut name = self.name()?.to_string();
        while self.take(".") {
            name = format!("{name}.{}", self.name()?);
        }
        let arguments = if self.take("(") { self.arguments()? } else { Arguments::default() };
        Ok(Invocation { name: name.into(), arguments })
    }

    pub(super) fn filters(&mut self, mut value: Expr) -> Parsed<Expr> {
        loop {
            value = if self.take("|") {
                let filter = self.invocation()?;
                let levels = value.levels.max(filter.arguments.levels());
                self.expr(Kind::Filter(Some(Box::new(value)), Box::new(filter)), levels)?
            } else if self.take_name("is") {
                self.test(value)?
            } else if self.take("(") {
                let arguments = self.arguments()?;
                let levels = value.levels.max(arguments.levels());
                self.expr(Kind::Call(Box::new(value), Box::new(arguments)), levels)?
            } else {
                return Ok(value);
            };
        }
    }

    pub(super) fn test(&mut self, value: Expr) -> Parsed<Expr> {
        let negated = self.take_name("not");
        let mut test = self.invocation()?;
        let takes_operand = match self.peek() {
            Some(Token::Name(name)) => {
                !matches!(*name, "else" | "or" | "and" | "is" | "if" | "recursive" | "not" | "in")
            }
            Some(Token::Text(_) | Token::Int(_) | Token::Float(_)) => true,
            _ => self.is("[") || self.is("{"),
        };
        if takes_operand && test.arguments.positional.is_empty() && test.arguments.named.is_empty() {
            let operand = self.nested(Self::primary)?;
            test.arguments.positional.push(self.postfix(operand)?);
        }
        let levels = value.levels.max(test.arguments.levels());
        let result = self.expr(Kind::Test(Box::new(value), Box::new(test)), levels)?;
        if !negated {
            return Ok(result);
        }
        let levels = result.levels;
        self.expr(Kind::Not(Box::new(result)), levels)
    }
}

impl Arguments {
    fn levels(&self) -> u16 {
        let named = self.named.iter().map(|(_, expr)| expr);
        self.positional.iter().chain(named).map(|expr| expr.levels).max().unwrap_or(0)
    }
}
