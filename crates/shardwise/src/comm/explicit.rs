//! Scopes in which communication that the program does not ask for by name is a warning or an error.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::rc::Rc;

use crate::error::{Error, RankCall, Result, Site};
use crate::layout::Layout;
use crate::module_scope::user_site;
use crate::rank_context::{RankContext, in_scope, rank_context};

/// What to do about a redistribution that an operator makes by itself, because its inputs are not placed as it needs them.
///
/// A redistribution that a program asks for by name (`redistribute`, `full_tensor`, a collective of a group) is always allowed,
/// and so is one that communicates nothing. Scopes nest, the innermost counts, and each rank is in its own.
///
/// ```
/// use shardwise::prelude::*;
/// use shardwise::ExplicitRedistribution;
///
/// launch(2, |world| {
///     let mesh = world.mesh([("tp", 2)])?;
///     let x = DTensor::ones((2, 4), DType::F32, &mesh, [Shard(1)])?;
///     let error = ExplicitRedistribution::error().run(|| x.softmax(0)?.matmul(&x.t()?)?.exp()).unwrap_err().to_string();
///     assert!(error.contains("operator exp") && error.contains("from [2, 2] on tp=2: P(sum)"), "{error}");
///     ExplicitRedistribution::warn().run(|| x.matmul(&x.t()?)?.exp())?; // prints the same, once for this line
///     Ok(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "ExplicitRedistributionContext")]
#[derive(Clone)]
pub struct ExplicitRedistribution(Mode);

#[derive(Clone, Default)]
enum Mode {
    #[default]
    Allow,
    Warn(Rc<dyn Fn(&ImplicitRedistribution)>),
    Error,
}

/// A redistribution that an operator made, or would have made, by itself.
#[derive(Debug, Clone)]
pub struct ImplicitRedistribution {
    /// The operator.
    pub operator: &'static str,
    /// The layout of the tensor that moves, and the one that the operator needs; none where parts of tensors are fetched.
    pub layouts: Option<(Layout, Layout)>,
    /// The first collective that it takes, with the line of the program.
    pub call: RankCall,
}

impl fmt::Display for ImplicitRedistribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operator {} redistributes{} ({})", self.operator, moves(&self.layouts), self.call)
    }
}

fn moves(layouts: &Option<(Layout, Layout)>) -> String {
    layouts.as_ref().map(|(from, to)| format!(" a tensor from {from} to {to}")).unwrap_or_default()
}

impl ExplicitRedistribution {
    /// An implicit redistribution is [`Error::Implicit`], before anything is communicated.
    pub fn error() -> Self {
        ExplicitRedistribution(Mode::Error)
    }

    /// An implicit redistribution is printed to the standard error by the first rank of its group, once per operator and line of the
    /// program.
    pub fn warn() -> Self {
        let seen = RefCell::new(HashSet::new());
        Self::warn_to(move |found| {
            let new = seen.borrow_mut().insert((found.operator, found.call.site.clone()));
            if new && found.call.rank == found.call.group[0] {
                eprintln!("warning: {found}; redistribute the tensor first if that is meant");
            }
        })
    }

    /// An implicit redistribution is handed to a function, and executed.
    pub fn warn_to(report: impl Fn(&ImplicitRedistribution) + 'static) -> Self {
        ExplicitRedistribution(Mode::Warn(Rc::new(report)))
    }

    /// Nothing is reported; for a part of a scope.
    pub fn allow() -> Self {
        ExplicitRedistribution(Mode::Allow)
    }

    /// Runs `body` in this scope.
    pub fn run<R>(&self, body: impl FnOnce() -> R) -> R {
        in_scope(|context| enter(context, self.0.clone()), |context, before| drop(enter(context, before)), body)
    }
}

fn enter(context: &RankContext, mode: Mode) -> Mode {
    context.reports_implicit.set(!matches!(mode, Mode::Allow));
    context.implicit_redistributions.replace(mode)
}

/// The layouts between which a tensor is being redistributed, and whether that has been reported.
type Moving = Option<(Layout, Layout, bool)>;

/// Runs `body`, which redistributes a tensor; reports inside name its layouts.
pub(crate) fn while_moving<R>(from: &Layout, to: &Layout, body: impl FnOnce() -> R) -> R {
    if !rank_context(|context| context.reports_implicit.get()) {
        return body();
    }
    let enter = |context: &RankContext| context.moving.replace::<Moving>(Some((from.clone(), to.clone(), false)));
    in_scope(enter, |context, before| drop(context.moving.replace(before)), body)
}

/// Reports a collective that an operator is about to make by itself.
pub(super) fn check(
    operator: &'static str,
    call: &'static str,
    rank: usize,
    group: &[usize],
    site: Site,
) -> Result<()> {
    if !rank_context(|context| context.reports_implicit.get()) {
        return Ok(());
    }
    let take = |moving: &mut Moving| match moving {
        Some((from, to, reported)) => (Some((from.clone(), to.clone())), std::mem::replace(reported, true)),
        None => (None, false),
    };
    let (layouts, reported) = rank_context(|context| context.moving.with(take));
    let call = RankCall { rank, call: call.to_string(), group: group.to_vec(), site: user_site(site).to_string() };
    // Not borrowed while it runs: a report may use tensors.
    match rank_context(|context| context.implicit_redistributions.with(|mode: &mut Mode| mode.clone())) {
        Mode::Error => Err(Error::Implicit { operator, moves: moves(&layouts), call: Box::new(call) }),
        Mode::Warn(report) if !reported => {
            report(&ImplicitRedistribution { operator, layouts, call });
            Ok(())
        }
        Mode::Warn(_) | Mode::Allow => Ok(()),
    }
}
