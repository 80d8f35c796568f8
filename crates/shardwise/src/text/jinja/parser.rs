//! Tokens as statements and expressions, with the precedence of Jinja's operators.

use std::sync::Arc;

use super::ast::{Arguments, Comparison, Expr, For, Invocation, Kind, Macro, Operator, Statement, Target};
use super::lexer::Token;
use super::value::TemplateValue;
use super::{Problem, check};

/// Brackets, signs and blocks inside each other. The parser calls itself for each; public templates have about ten.
const MOST_NESTED: usize = 100;

/// Operations of an expression of which each takes the result of another, such as `a + b + c`.
const MOST_LEVELS: u16 = 400;

type Parsed<T> = Result<T, Problem>;

pub(super) struct Parser<'s> {
    tokens: std::vec::IntoIter<(Token<'s>, u32)>,
    line: u32,
    nested: usize,
    loops: usize,
}

impl<'s> Parser<'s> {
    pub(super) fn new(tokens: Vec<(Token<'s>, u32)>) -> Self {
        Parser { tokens: tokens.into_iter(), line: 1, nested: 0, loops: 0 }
    }

    pub(super) fn template(mut self) -> Parsed<Vec<Statement>> {
        let result = self.statements(&[]).map(|(body, _)| body);
        result.map_err(|problem| problem.at(self.line))
    }

    fn peek(&self) -> Option<&Token<'s>> {
        self.tokens.as_slice().first().map(|(token, _)| token)
    }

    fn next(&mut self) -> Parsed<Token<'s>> {
        let (token, line) = self.tokens.next().ok_or_else(|| Problem::new("the template ends too early"))?;
        self.line = line;
        Ok(token)
    }

    fn is(&self, operator: &str) -> bool {
        matches!(self.peek(), Some(Token::Operator(found)) if *found == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Some(Token::Name(found)) if *found == name)
    }

    fn take(&mut self, operator: &str) -> bool {
        let found = self.is(operator);
        if found {
            self.tokens.next();
        }
        found
    }

    fn take_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.tokens.next();
        }
        found
    }

    fn expect(&mut self, operator: &str) -> Parsed<()> {
        if self.take(operator) { Ok(()) } else { Err(self.unexpected(&format!("`{operator}`"))) }
    }

    fn name(&mut self) -> Parsed<Arc<str>> {
        match self.peek() {
            Some(Token::Name(name)) => {
                let name = Arc::from(*name);
                self.next()?;
                Ok(name)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    fn unexpected(&mut self, needed: &str) -> Problem {
        if let Some((_, line)) = self.tokens.as_slice().first() {
            self.line = *line;
        }
        let found = match self.peek() {
            None => "the end of the template".to_string(),
            Some(Token::Data(_)) => "text".to_string(),
            Some(Token::PrintBegin) => "`{{`".to_string(),
            Some(Token::PrintEnd) => "`}}`".to_string(),
            Some(Token::TagBegin) => "`{%`".to_string(),
            Some(Token::TagEnd) => "`%}`".to_string(),
            Some(Token::Name(name)) => format!("`{}`", name.chars().take(40).collect::<String>()),
            Some(Token::Operator(operator)) => format!("`{operator}`"),
            Some(Token::Text(_)) => "a text".to_string(),
            Some(Token::Int(_) | Token::Float(_)) => "a number".to_string(),
        };
        Problem::new(format!("syntax error: unexpected {found}, expected {needed}"))
    }

    /// Runs `parse` one level deeper.
    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        self.nested += 1;
        check(self.nested <= MOST_NESTED, || {
            format!("brackets, signs or blocks nested more than {MOST_NESTED} levels deep")
        })?;
        let result = parse(self);
        self.nested -= 1;
        result
    }

    /// An expression around other expressions.
    fn expr(&self, kind: Kind, levels: u16) -> Parsed<Expr> {
        check(levels < MOST_LEVELS, || format!("more than {MOST_LEVELS} operations that depend on each other"))?;
        Ok(Expr { kind, line: self.line, levels: levels + 1 })
    }

    // ---- statements

    /// Statements up to a tag of `ends`, whose name is returned and taken, or to the end of the template if there is none.
    fn statements(&mut self, ends: &[&str]) -> Parsed<(Vec<Statement>, &'s str)> {
        let mut body = Vec::new();
        loop {
            let Some(token) = self.peek() else {
                if ends.is_empty() {
                    return Ok((body, ""));
                }
                return Err(self.unexpected(&format!("the tag `{}`", ends.join("` or `"))));
            };
            match token {
                Token::Data(_) => {
                    if let Token::Data(text) = self.next()? {
                        body.push(Statement::Data(text.into()));
                    }
                }
                Token::PrintBegin => {
                    self.next()?;
                    let value = self.tuple(true)?;
                    match self.next()? {
                        Token::PrintEnd => body.push(Statement::Print(value)),
                        _ => return Err(Problem::new("syntax error: expected `}}` after the expression")),
                    }
                }
                _ => {
                    self.next()?;
                    let Token::Name(tag) = self.next()? else {
                        return Err(Problem::new("syntax error: a tag without a name"));
                    };
                    if ends.contains(&tag) {
                        return Ok((body, tag));
                    }
                    let statement = self.nested(|parser| parser.statement(tag))?;
                    body.extend(statement);
                }
            }
        }
    }

    fn tag_end(&mut self) -> Parsed<()> {
        match self.peek() {
            Some(Token::TagEnd) => self.next().map(drop),
            _ => Err(self.unexpected("`%}`")),
        }
    }

    /// The body of a tag after its `%}`, with the end of the tag that ends it.
    fn body(&mut self, end: &str) -> Parsed<Vec<Statement>> {
        self.tag_end()?;
        let (body, _) = self.statements(&[end])?;
        Ok(body)
    }

    fn statement(&mut self, tag: &str) -> Parsed<Option<Statement>> {
        let statement = match tag {
            "if" => return self.condition().map(Some),
            "for" => return self.for_loop().map(Some),
            "set" => return self.set().map(Some),
            "macro" => {
                let name = self.name()?;
                self.expect("(")?;
                let parameters = self.parameters()?;
                let body = self.outside_loops(|parser| parser.body("endmacro"))?;
                if !matches!(self.peek(), Some(Token::TagEnd)) {
                    self.name()?;
                }
                Statement::Macro(Box::new(Macro { name, parameters, body }))
            }
            "call" => {
                let parameters = if self.take("(") { self.parameters()? } else { Vec::new() };
                let call = self.expression()?;
                check(matches!(call.kind, Kind::Call(..)), || "syntax error: `call` without a call".to_string())?;
                let body = self.outside_loops(|parser| parser.body("endcall"))?;
                Statement::Call(call, Box::new(Macro { name: "caller".into(), parameters, body }))
            }
            "filter" => {
                let first = self.invocation()?;
                let mut filters = vec![self.expr(Kind::Filter(None, Box::new(first)), 0)?];
                self.more_filters(&mut filters)?;
                Statement::Filter(filters, self.body("endfilter")?)
            }
            "with" => {
                let mut values = Vec::new();
                while !matches!(self.peek(), Some(Token::TagEnd)) {
                    if !values.is_empty() {
                        self.expect(",")?;
                    }
                    let target = self.target()?;
                    self.expect("=")?;
                    values.push((target, self.expression()?));
                }
                Statement::With(values, self.body("endwith")?)
            }
            "block" => {
                self.name()?;
                let body = self.body("endblock")?;
                if !matches!(self.peek(), Some(Token::TagEnd)) {
                    self.name()?;
                }
                Statement::Scope(body)
            }
            "autoescape" => {
                self.expression()?;
                Statement::Scope(self.body("endautoescape")?)
            }
            // Marks the answers of a conversation, and renders them.
            "generation" => {
                let body = self.body("endgeneration")?;
                let always = self.expr(Kind::Constant(TemplateValue::Bool(true)), 0)?;
                Statement::If(vec![(always, body)], Vec::new())
            }
            "do" => Statement::Do(self.tuple(true)?),
            "break" | "continue" => {
                check(self.loops > 0, || format!("syntax error: `{tag}` outside of a loop"))?;
                if tag == "break" { Statement::Break } else { Statement::Continue }
            }
            "include" | "import" | "from" | "extends" => {
                return Err(Problem::new(format!("`{tag}` of another template, of which a chat template has none")));
            }
            _ => {
                let tag: String = tag.chars().take(40).collect();
                return Err(Problem::new(format!("syntax error: unknown tag `{tag}`")));
            }
        };
        self.tag_end()?;
        Ok(Some(statement))
    }

    fn outside_loops<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        let loops = std::mem::take(&mut self.loops);
        let result = parse(self);
        self.loops = loops;
        result
    }

    fn condition(&mut self) -> Parsed<Statement> {
        let mut branches = Vec::new();
        loop {
            let condition = self.tuple(true)?;
            self.tag_end()?;
            let (body, end) = self.statements(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            match end {
                "elif" => {}
                "else" => {
                    let otherwise = self.body("endif")?;
                    self.tag_end()?;
                    return Ok(Statement::If(branches, otherwise));
                }
                _ => {
                    self.tag_end()?;
                    return Ok(Statement::If(branches, Vec::new()));
                }
            }
        }
    }

    fn for_loop(&mut self) -> Parsed<Statement> {
        let target = self.target()?;
        if !self.take_name("in") {
            return Err(self.unexpected("`in`"));
        }
        let iterable = self.tuple(false)?;
        let condition = if self.take_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.take_name("recursive");
        self.tag_end()?;
        self.loops += 1;
        let (body, end) = self.statements(&["else", "endfor"])?;
        self.loops -= 1;
        let otherwise = if end == "else" { self.body("endfor")? } else { Vec::new() };
        self.tag_end()?;
        Ok(Statement::For(Box::new(For { target, iterable, condition, recursive, body, otherwise })))
    }

    fn set(&mut self) -> Parsed<Statement> {
        let target = self.target()?;
        let statement = if self.take("=") {
            Statement::Set(target, self.tuple(true)?)
        } else {
            let mut filters = Vec::new();
            self.more_filters(&mut filters)?;
            Statement::SetBlock(target, filters, self.body("endset")?)
        };
        self.tag_end()?;
        Ok(statement)
    }

    fn more_filters(&mut self, filters: &mut Vec<Expr>) -> Parsed<()> {
        while self.take("|") {
            let filter = self.invocation()?;
            filters.push(self.expr(Kind::Filter(None, Box::new(filter)), 0)?);
        }
        Ok(())
    }

    /// Parameters of a macro after the opening bracket.
    fn parameters(&mut self) -> Parsed<Vec<(Arc<str>, Option<Expr>)>> {
        let mut parameters = Vec::new();
        while !self.take(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
                if self.take(")") {
                    break;
                }
            }
            let name = self.name()?;
            let default = if self.take("=") { Some(self.expression()?) } else { None };
            parameters.push((name, default));
        }
        Ok(parameters)
    }

    /// One or more names, in brackets or not.
    fn target(&mut self) -> Parsed<Target> {
        let first = self.one_target()?;
        if !self.is(",") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.take(",") {
            if self.is("=") || self.is_name("in") {
                break;
            }
            all.push(self.one_target()?);
        }
        Ok(Target::Tuple(all))
    }

    fn one_target(&mut self) -> Parsed<Target> {
        if self.take("(") {
            let inner = self.nested(Self::target)?;
            self.expect(")")?;
            return Ok(inner);
        }
        let name = self.name()?;
        if self.take(".") {
            return Ok(Target::Attribute(name, self.name()?));
        }
        Ok(Target::Name(name))
    }

    // ---- expressions, the weakest operators first

    /// An expression, or several with commas between them. Without `conditions`, `if` belongs to the tag.
    fn tuple(&mut self, conditions: bool) -> Parsed<Expr> {
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

    fn expression(&mut self) -> Parsed<Expr> {
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

    fn pair(&self, kind: fn(Box<(Expr, Expr)>) -> Kind, left: Expr, right: Expr) -> Parsed<Expr> {
        let levels = left.levels.max(right.levels);
        self.expr(kind(Box::new((left, right))), levels)
    }

    fn or(&mut self) -> Parsed<Expr> {
        let mut left = self.and()?;
        while self.take_name("or") {
            let right = self.and()?;
            left = self.pair(Kind::Or, left, right)?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Parsed<Expr> {
        let mut left = self.not()?;
        while self.take_name("and") {
            let right = self.not()?;
            left = self.pair(Kind::And, left, right)?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Parsed<Expr> {
        if self.take_name("not") {
            let operand = self.nested(Self::not)?;
            let levels = operand.levels;
            return self.expr(Kind::Not(Box::new(operand)), levels);
        }
        self.comparison()
    }

    fn comparison(&mut self) -> Parsed<Expr> {
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

    fn binary(&mut self, operators: &[(&str, Operator)], operand: fn(&mut Self) -> Parsed<Expr>) -> Parsed<Expr> {
        let mut left = operand(self)?;
        loop {
            let Some((_, operator)) = operators.iter().find(|(text, _)| self.is(text)) else { return Ok(left) };
            self.next()?;
            let right = operand(self)?;
            let levels = left.levels.max(right.levels);
            left = self.expr(Kind::Binary(*operator, Box::new((left, right))), levels)?;
        }
    }

    fn sum(&mut self) -> Parsed<Expr> {
        self.binary(&[("+", Operator::Add), ("-", Operator::Subtract)], Self::concat)
    }

    fn concat(&mut self) -> Parsed<Expr> {
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

    fn product(&mut self) -> Parsed<Expr> {
        let operators = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("//", Operator::FloorDivide),
            ("%", Operator::Remainder),
        ];
        self.binary(&operators, |parser| parser.binary(&[("**", Operator::Power)], |parser| parser.unary(true)))
    }

    fn unary(&mut self, filters: bool) -> Parsed<Expr> {
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

    fn primary(&mut self) -> Parsed<Expr> {
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
    fn items<T>(&mut self, end: &str, item: impl Fn(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
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

    fn postfix(&mut self, mut value: Expr) -> Parsed<Expr> {
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

    fn subscript(&mut self, value: Expr) -> Parsed<Expr> {
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
    fn arguments(&mut self) -> Parsed<Arguments> {
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
    fn invocation(&mut self) -> Parsed<Invocation> {
        let mut name = self.name()?.to_string();
        while self.take(".") {
            name = format!("{name}.{}", self.name()?);
        }
        let arguments = if self.take("(") { self.arguments()? } else { Arguments::default() };
        Ok(Invocation { name: name.into(), arguments })
    }

    fn filters(&mut self, mut value: Expr) -> Parsed<Expr> {
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

    fn test(&mut self, value: Expr) -> Parsed<Expr> {
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
