//! The parts of a template.

use std::sync::Arc;

use super::value::TemplateValue;

/// An expression, with its line and the number of expressions inside each other that it is.
pub(super) struct Expr {
    pub(super) kind: Kind,
    pub(super) line: u32,
    pub(super) levels: u16,
}

pub(super) enum Kind {
    Constant(TemplateValue),
    Name(Arc<str>),
    Tuple(Vec<Expr>),
    List(Vec<Expr>),
    Map(Vec<(Expr, Expr)>),
    Attribute(Box<Expr>, Arc<str>),
    Item(Box<(Expr, Expr)>),
    Slice(Box<(Expr, [Option<Expr>; 3])>),
    Call(Box<Expr>, Box<Arguments>),
    /// Without an operand in the tag `filter`.
    Filter(Option<Box<Expr>>, Box<Invocation>),
    Test(Box<Expr>, Box<Invocation>),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    Binary(Operator, Box<(Expr, Expr)>),
    And(Box<(Expr, Expr)>),
    Or(Box<(Expr, Expr)>),
    Concat(Vec<Expr>),
    Compare(Box<(Expr, Vec<(Comparison, Expr)>)>),
    /// Condition, value, other value.
    Condition(Box<(Expr, Expr, Option<Expr>)>),
}

/// The name and the arguments of a filter or a test.
pub(super) struct Invocation {
    pub(super) name: Arc<str>,
    pub(super) arguments: Arguments,
}

#[derive(Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(Arc<str>, Expr)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
    In,
    NotIn,
}

/// What an assignment or a loop sets.
pub(super) enum Target {
    Name(Arc<str>),
    Attribute(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

pub(super) struct For {
    pub(super) target: Target,
    pub(super) iterable: Expr,
    pub(super) condition: Option<Expr>,
    pub(super) recursive: bool,
    pub(super) body: Vec<Statement>,
    pub(super) otherwise: Vec<Statement>,
}

pub(super) struct Macro {
    pub(super) name: Arc<str>,
    pub(super) parameters: Vec<(Arc<str>, Option<Expr>)>,
    pub(super) body: Vec<Statement>,
}

pub(super) enum Statement {
    Data(Arc<str>),
    Print(Expr),
    /// Evaluated and dropped.
    Do(Expr),
    If(Vec<(Expr, Vec<Statement>)>, Vec<Statement>),
    For(Box<For>),
    Set(Target, Expr),
    /// With the filters that the text passes.
    SetBlock(Target, Vec<Expr>, Vec<Statement>),
    With(Vec<(Target, Expr)>, Vec<Statement>),
    Scope(Vec<Statement>),
    Macro(Box<Macro>),
    Call(Expr, Box<Macro>),
    Filter(Vec<Expr>, Vec<Statement>),
    Break,
    Continue,
}
