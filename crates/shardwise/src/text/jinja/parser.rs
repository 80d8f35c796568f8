//! Tokens as statements; `expressions` has what is inside of them.

mod expressions;

use std::sync::Arc;

use super::ast::{Expr, For, Kind, Macro, Statement, Target};
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
}
