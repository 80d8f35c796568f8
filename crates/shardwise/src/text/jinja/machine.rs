//! Executes statements within a budget.

use std::sync::Arc;

use super::ast::{Expr, For, Kind, Macro, Statement, Target};
use super::value::{TemplateValue, VALUE_BYTES};
use super::{Problem, check};

pub(super) type Outcome<T> = Result<T, Problem>;

/// Steps of a rendering: a hundred times those of a conversation of a hundred messages. Four more come with every byte of what is
/// rendered, as templates look at every message several times.
const MOST_STEPS: u64 = 2_000_000;
const STEPS_PER_BYTE: u64 = 64;

/// Bytes of all texts and lists that a rendering builds, and as many for every byte of what is rendered: a message is
/// trimmed, split and joined before it is printed.
const MOST_BYTES: u64 = 8 << 20;
const BYTES_PER_BYTE: u64 = 64;

/// Bytes of text that are compared, copied or searched in one step.
const BYTES_PER_STEP: u64 = 64;

/// Statements, expressions and calls inside each other. Macros that call each other reach it; the stack of the rendering thread
/// has space for it.
const MOST_NESTED: usize = 2500;

/// Whether the next statement of a block is executed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// Variables of a block.
#[derive(Default, Clone)]
pub(super) struct Scope {
    variables: Vec<(Arc<str>, TemplateValue)>,
}

impl Scope {
    fn set(&mut self, name: &Arc<str>, value: TemplateValue) {
        match self.variables.iter_mut().find(|(own, _)| own == name) {
            Some((_, own)) => *own = value,
            None => self.variables.push((name.clone(), value)),
        }
    }
}

/// A macro with the variables of the blocks around it, but for those of the template itself.
struct Closure<'t> {
    declaration: &'t Macro,
    scopes: Vec<Scope>,
}

/// A loop that is being executed.
pub(super) struct Loop<'t> {
    declaration: &'t For,
    pub(super) items: Vec<TemplateValue>,
    pub(super) at: usize,
    pub(super) depth: usize,
    pub(super) last_changed: Option<TemplateValue>,
}

/// One rendering of a template.
pub(in crate::text) struct Machine<'t> {
    variables: Vec<(Arc<str>, TemplateValue)>,
    scopes: Vec<Scope>,
    /// The text, and those of the blocks whose text is a value.
    out: Vec<String>,
    macros: Vec<Closure<'t>>,
    pub(super) namespaces: Vec<Vec<(Arc<str>, TemplateValue)>>,
    pub(super) loops: Vec<Loop<'t>>,
    steps: u64,
    bytes: u64,
    nested: usize,
}

impl<'t> Machine<'t> {
    pub(in crate::text) fn new(variables: Vec<(Arc<str>, TemplateValue)>) -> Self {
        let given: u64 = variables.iter().map(|(_, value)| value.size()).sum();
        Machine {
            variables,
            scopes: vec![Scope::default()],
            out: vec![String::new()],
            macros: Vec::new(),
            namespaces: Vec::new(),
            loops: Vec::new(),
            steps: MOST_STEPS + STEPS_PER_BYTE * given,
            bytes: MOST_BYTES + BYTES_PER_BYTE * given,
            nested: 0,
        }
    }

    pub(super) fn render(mut self, body: &'t [Statement]) -> Outcome<String> {
        self.block(body)?;
        Ok(self.out.pop().unwrap_or_default())
    }

    // ---- the budget

    /// Accounts for `steps`, before they are done.
    pub(super) fn charge_steps(&mut self, steps: u64) -> Outcome<()> {
        let left = self.steps.checked_sub(steps);
        self.steps = left.ok_or_else(|| Problem::new("more steps than a chat template may execute"))?;
        Ok(())
    }

    /// Accounts for reading `bytes` of text.
    pub(super) fn charge_read(&mut self, bytes: usize) -> Outcome<()> {
        self.charge_steps(bytes as u64 / BYTES_PER_STEP)
    }

    /// Accounts for a text of `bytes`, before it is built.
    pub(super) fn charge_text(&mut self, bytes: usize) -> Outcome<()> {
        let left = self.bytes.checked_sub((bytes as u64).saturating_add(VALUE_BYTES));
        self.bytes = left.ok_or_else(|| Problem::new("more text and lists than a chat template may build"))?;
        self.charge_steps(1 + bytes as u64 / BYTES_PER_STEP)
    }

    /// Accounts for a list of `count` values, before it is built.
    pub(super) fn charge_list(&mut self, count: usize) -> Outcome<()> {
        let bytes = (count as u64).saturating_mul(VALUE_BYTES);
        self.charge_text(usize::try_from(bytes).unwrap_or(usize::MAX >> 1))?;
        self.charge_steps(count as u64)
    }

    pub(super) fn text(&mut self, text: &str) -> Outcome<TemplateValue> {
        self.charge_text(text.len())?;
        Ok(TemplateValue::text(text))
    }

    /// Adds to a text that is being built.
    pub(super) fn push(&mut self, text: &mut String, more: &str) -> Outcome<()> {
        let left = self.bytes.checked_sub(more.len() as u64);
        self.bytes = left.ok_or_else(|| Problem::new("more text than a chat template may build"))?;
        self.charge_steps(1 + more.len() as u64 / BYTES_PER_STEP)?;
        text.push_str(more);
        Ok(())
    }

    /// Runs `work` one level deeper.
    pub(super) fn nested<T>(&mut self, work: impl FnOnce(&mut Self) -> Outcome<T>) -> Outcome<T> {
        self.nested += 1;
        check(self.nested <= MOST_NESTED, || "macros, loops or values nested too deep".to_string())?;
        let result = work(self);
        self.nested -= 1;
        result
    }

    // ---- variables

    pub(super) fn lookup(&mut self, name: &str) -> Outcome<TemplateValue> {
        let (mut seen, mut found) = (0, None);
        for scope in self.scopes.iter().rev() {
            seen += 1 + scope.variables.len();
            if let Some((_, value)) = scope.variables.iter().find(|(own, _)| &**own == name) {
                found = Some(value.clone());
                break;
            }
        }
        // Names are compared one by one: a template with thousands of variables pays for it.
        self.charge_steps(seen as u64 / 8)?;
        Ok(found.unwrap_or_else(|| {
            let given = self.variables.iter().rev().find(|(own, _)| &**own == name);
            given.map_or_else(|| TemplateValue::function(name), |(_, value)| value.clone())
        }))
    }

    fn set(&mut self, target: &Target, value: TemplateValue) -> Outcome<()> {
        match target {
            Target::Name(name) => {
                self.charge_list(1)?;
                let Some(scope) = self.scopes.last_mut() else { return Ok(()) };
                let count = scope.variables.len();
                scope.set(name, value);
                self.charge_steps(count as u64 / 16)
            }
            Target::Attribute(name, field) => {
                let TemplateValue::Namespace(index) = self.lookup(name)? else {
                    return Err(Problem::new(format!("`{name}.{field}` is set, and `{name}` is not a namespace")));
                };
                self.charge_list(1)?;
                let fields = &mut self.namespaces[index];
                match fields.iter_mut().find(|(own, _)| own == field) {
                    Some((_, own)) => *own = value,
                    None => fields.push((field.clone(), value)),
                }
                let count = fields.len();
                self.charge_steps(count as u64 / 16)
            }
            Target::Tuple(targets) => {
                let items = self.items(&value)?;
                check(items.len() == targets.len(), || {
                    format!("{} values are set from {} values", targets.len(), items.len())
                })?;
                targets.iter().zip(items).try_for_each(|(target, item)| self.set(target, item))
            }
        }
    }

    // ---- statements

    fn block(&mut self, body: &'t [Statement]) -> Outcome<Flow> {
        for statement in body {
            let flow = self.statement(statement)?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    /// Executes a block with variables of its own.
    fn scope(&mut self, body: &'t [Statement]) -> Outcome<Flow> {
        self.scopes.push(Scope::default());
        let flow = self.nested(|machine| machine.block(body));
        self.scopes.pop();
        flow
    }

    /// The text of a block with variables of its own.
    fn captured(&mut self, body: &'t [Statement]) -> Outcome<TemplateValue> {
        self.capture(|machine| machine.scope(body).map(drop))
    }

    fn capture(&mut self, work: impl FnOnce(&mut Self) -> Outcome<()>) -> Outcome<TemplateValue> {
        self.out.push(String::new());
        let result = work(self);
        let text = self.out.pop().unwrap_or_default();
        result?;
        self.text(&text)
    }

    fn emit(&mut self, text: &str) -> Outcome<()> {
        let mut out = self.out.pop().unwrap_or_default();
        let result = self.push(&mut out, text);
        self.out.push(out);
        result
    }

    /// Prints a value.
    fn print(&mut self, value: &TemplateValue) -> Outcome<()> {
        let mut out = self.out.pop().unwrap_or_default();
        let result = self.write(&mut out, value);
        self.out.push(out);
        result
    }

    fn statement(&mut self, statement: &'t Statement) -> Outcome<Flow> {
        self.charge_steps(1)?;
        match statement {
            Statement::Data(text) => self.emit(text)?,
            Statement::Print(expr) => {
                let value = self.value(expr)?;
                self.print(&value).map_err(|problem| problem.at(expr.line))?;
            }
            Statement::Do(expr) => drop(self.value(expr)?),
            Statement::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.value(condition)?.is_true() {
                        return self.nested(|machine| machine.block(body));
                    }
                }
                return self.nested(|machine| machine.block(otherwise));
            }
            Statement::For(declaration) => self.for_loop(declaration)?,
            Statement::Set(target, expr) => {
                let value = self.value(expr)?;
                self.set(target, value).map_err(|problem| problem.at(expr.line))?;
            }
            Statement::SetBlock(target, filters, body) => {
                let text = self.captured(body)?;
                let value = self.filtered(filters, text)?;
                self.set(target, value)?;
            }
            Statement::With(values, body) => {
                let values: Vec<(&Target, TemplateValue)> =
                    values.iter().map(|(target, expr)| Ok((target, self.value(expr)?))).collect::<Outcome<_>>()?;
                self.scopes.push(Scope::default());
                let flow = values
                    .into_iter()
                    .try_for_each(|(target, value)| self.set(target, value))
                    .and_then(|()| self.nested(|machine| machine.block(body)));
                self.scopes.pop();
                return flow;
            }
            Statement::Scope(body) => return self.scope(body),
            Statement::Macro(declaration) => {
                let value = self.closure(declaration)?;
                self.set(&Target::Name(declaration.name.clone()), value)?;
            }
            Statement::Call(call, declaration) => {
                let caller = self.closure(declaration)?;
                let value = self.call_with_caller(call, caller)?;
                self.print(&value)?;
            }
            Statement::Filter(filters, body) => {
                let text = self.captured(body)?;
                let value = self.filtered(filters, text)?;
                self.print(&value)?;
            }
            Statement::Break => return Ok(Flow::Break),
            Statement::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn filtered(&mut self, filters: &'t [Expr], mut value: TemplateValue) -> Outcome<TemplateValue> {
        for filter in filters {
            let Kind::Filter(_, invocation) = &filter.kind else { continue };
            value = self.filter(value, invocation).map_err(|problem| problem.at(filter.line))?;
        }
        Ok(value)
    }

    fn for_loop(&mut self, declaration: &'t For) -> Outcome<()> {
        let iterable = self.value(&declaration.iterable)?;
        self.iterate(declaration, &iterable, 0).map_err(|problem| problem.at(declaration.iterable.line))
    }

    /// Executes a loop over what `iterable` contains.
    fn iterate(&mut self, declaration: &'t For, iterable: &TemplateValue, depth: usize) -> Outcome<()> {
        let mut items = self.items(iterable)?;
        if let Some(condition) = &declaration.condition {
            let mut kept = Vec::new();
            for item in items {
                self.scopes.push(Scope::default());
                let holds = self.set(&declaration.target, item.clone()).and_then(|()| self.value(condition));
                self.scopes.pop();
                if holds?.is_true() {
                    kept.push(item);
                }
            }
            items = kept;
        }
        if items.is_empty() {
            return self.nested(|machine| machine.scope(&declaration.otherwise).map(drop));
        }
        let count = items.len();
        self.loops.push(Loop { declaration, items, at: 0, depth, last_changed: None });
        let number = self.loops.len() - 1;
        let result = self.iterations(declaration, number, count);
        self.loops.truncate(number);
        result
    }

    fn iterations(&mut self, declaration: &'t For, number: usize, count: usize) -> Outcome<()> {
        let name: Arc<str> = "loop".into();
        for at in 0..count {
            self.loops[number].at = at;
            let item = self.loops[number].items[at].clone();
            self.scopes.push(Scope::default());
            let flow = self.set(&declaration.target, item).and_then(|()| {
                if let Some(scope) = self.scopes.last_mut() {
                    scope.set(&name, TemplateValue::Loop(number));
                }
                self.nested(|machine| machine.block(&declaration.body))
            });
            self.scopes.pop();
            if flow? == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    /// Calls `loop`: the loop once more, over other items.
    pub(super) fn call_loop(&mut self, number: usize, iterable: &TemplateValue) -> Outcome<TemplateValue> {
        let running = self.loop_at(number)?;
        let (declaration, depth) = (running.declaration, running.depth + 1);
        check(declaration.recursive, || "a loop is called that is not `recursive`".to_string())?;
        self.capture(|machine| machine.nested(|machine| machine.iterate(declaration, iterable, depth)))
    }

    pub(super) fn loop_at(&mut self, number: usize) -> Outcome<&mut Loop<'t>> {
        self.loops.get_mut(number).ok_or_else(|| Problem::new("`loop` of a loop that has ended"))
    }

    // ---- macros

    fn closure(&mut self, declaration: &'t Macro) -> Outcome<TemplateValue> {
        let scopes: Vec<Scope> = self.scopes[1..].to_vec();
        let count: usize = scopes.iter().map(|scope| 1 + scope.variables.len()).sum();
        self.charge_list(1 + 2 * count)?;
        self.macros.push(Closure { declaration, scopes });
        Ok(TemplateValue::Macro(self.macros.len() - 1))
    }

    pub(super) fn call_macro(
        &mut self,
        number: usize,
        positional: Vec<TemplateValue>,
        mut named: Vec<(Arc<str>, TemplateValue)>,
    ) -> Outcome<TemplateValue> {
        let declaration = self.macros[number].declaration;
        let copied: usize = self.macros[number].scopes.iter().map(|scope| 1 + scope.variables.len()).sum();
        self.charge_list(1 + declaration.parameters.len() + 2 * copied)?;
        let mut scopes = self.macros[number].scopes.clone();
        scopes.push(Scope::default());
        let (given, parameters) = (positional.len(), declaration.parameters.len());
        check(given <= parameters, || {
            format!("`{}` is called with {given} arguments and has {parameters}", declaration.name)
        })?;
        // Scopes of the caller come back after the call; those of the template itself stay.
        let callers = self.scopes.split_off(1);
        self.scopes.append(&mut scopes);
        let result = self.nested(|machine| {
            machine.capture(|machine| {
                let mut positional = positional.into_iter();
                for (name, default) in &declaration.parameters {
                    let at = named.iter().position(|(own, _)| own == name);
                    let value = match (positional.next(), at, default) {
                        (Some(value), _, _) => value,
                        (None, Some(at), _) => named.swap_remove(at).1,
                        (None, None, Some(default)) => machine.value(default)?,
                        (None, None, None) => TemplateValue::Undefined,
                    };
                    machine.set(&Target::Name(name.clone()), value)?;
                }
                for (name, value) in named {
                    check(&*name == "caller", || format!("`{}` has no argument `{name}`", declaration.name))?;
                    machine.set(&Target::Name(name), value)?;
                }
                machine.block(&declaration.body).map(drop)
            })
        });
        self.scopes.truncate(1);
        self.scopes.extend(callers);
        result
    }
}
