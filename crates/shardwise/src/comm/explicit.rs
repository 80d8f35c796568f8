//! Scopes in which an implicit redistribution, one that an operator makes by itself, is a warning or an error.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::rc::Rc;

use crate::error::{Error, RankCall, Result, Site};
use crate::layout::Layout;
use crate::module_scope::user_site;
use crate::rank_context::{RankContext, in_scope, rank_context};

/// A policy for implicit redistributions, which an operator performs because it needs its inputs in another
/// layout. PyTorch's `ExplicitRedistributionContext`.
///
/// Explicit communication (`redistribute`, `full_tensor`, a collective of a group) is always allowed, and so is, unless
/// [`strict`](Self::strict), a redistribution that communicates nothing. Local: a scope belongs to the calling rank. Scopes nest, and the innermost
/// counts.
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
pub struct ExplicitRedistribution(ImplicitPolicy);

/// What happens to an implicit redistribution.
#[derive(Clone, Default)]
enum ImplicitPolicy {
    #[default]
    Allow,
    Warn(Rc<dyn Fn(&ImplicitRedistribution)>),
    Error,
    Strict,
}

/// An implicit redistribution, as reported to [`ExplicitRedistribution::warn_to`].
#[derive(Debug, Clone)]
pub struct ImplicitRedistribution {
    /// Name of the operator that redistributes.
    pub operator: &'static str,
    /// The layouts of the tensor before and after; `None` if the operator fetches parts of tensors instead.
    pub layouts: Option<(Layout, Layout)>,
    /// The first collective of the redistribution, with the source line of the operator.
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
    /// Fails an implicit redistribution with [`Error::Implicit`], before anything is communicated.
    pub fn error() -> Self {
        ExplicitRedistribution(ImplicitPolicy::Error)
    }

    /// Fails an implicit redistribution as [`error`](Self::error) does, also one that communicates nothing: a replicated input that
    /// an operator takes as a shard. PyTorch's `strict=True`.
    pub fn strict() -> Self {
        ExplicitRedistribution(ImplicitPolicy::Strict)
    }

    /// Prints an implicit redistribution to standard error, on the first rank of its group, once per operator and source
    /// line.
    pub fn warn() -> Self {
        let seen = RefCell::new(HashSet::new());
        Self::warn_to(move |found| {
            let new = seen.borrow_mut().insert((found.operator, found.call.site.clone()));
            if new && found.call.rank == found.call.group[0] {
                eprintln!("warning: {found}; redistribute the tensor first if that is meant");
            }
        })
    }

    /// Passes every implicit redistribution to `report`, and executes it.
    pub fn warn_to(report: impl Fn(&ImplicitRedistribution) + 'static) -> Self {
        ExplicitRedistribution(ImplicitPolicy::Warn(Rc::new(report)))
    }

    /// Allows implicit redistributions again, inside another scope.
    pub fn allow() -> Self {
        ExplicitRedistribution(ImplicitPolicy::Allow)
    }

    /// Runs `body` under this policy.
    pub fn run<R>(&self, body: impl FnOnce() -> R) -> R {
        in_scope(|context| enter(context, self.0.clone()), |context, before| drop(enter(context, before)), body)
    }
}

fn enter(context: &RankContext, policy: ImplicitPolicy) -> ImplicitPolicy {
    context.reports_implicit.set(!matches!(policy, ImplicitPolicy::Allow));
    context.implicit_redistributions.replace(policy)
}

/// The layouts before and after the redistribution that is being executed, and whether it has been reported.
type CurrentRedistribution = Option<(Layout, Layout, bool)>;

/// Runs `body`, which redistributes a tensor: reports from inside contain its layouts.
pub(crate) fn while_redistributing<R>(from: &Layout, to: &Layout, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| {
        context.moving.replace::<CurrentRedistribution>(Some((from.clone(), to.clone(), false)))
    };
    in_scope(enter, |context, before| drop(context.moving.replace(before)), body)
}

/// The layouts before and after the redistribution that is being executed.
pub(super) fn current_layouts() -> Option<(Layout, Layout)> {
    let layouts = |moving: &mut CurrentRedistribution| moving.as_ref().map(|(from, to, _)| (from.clone(), to.clone()));
    rank_context(|context| context.moving.with(layouts))
}

/// Applies the policy to a collective that an operator is about to make by itself.
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
    let take = |moving: &mut CurrentRedistribution| match moving {
        Some((from, to, reported)) => (Some((from.clone(), to.clone())), std::mem::replace(reported, true)),
        None => (None, false),
    };
    let (layouts, reported) = rank_context(|context| context.moving.with(take));
    let call = RankCall { rank, call: call.to_string(), group: group.to_vec(), site: user_site(site).to_string() };
    // Cloned, so that nothing is borrowed while the callback runs: it may use tensors.
    match rank_context(|context| context.implicit_redistributions.with(|policy: &mut ImplicitPolicy| policy.clone())) {
        ImplicitPolicy::Error | ImplicitPolicy::Strict => {
            Err(Error::Implicit { operator, moves: moves(&layouts), call: Box::new(call) })
        }
        ImplicitPolicy::Warn(report) if !reported => {
            report(&ImplicitRedistribution { operator, layouts, call });
            Ok(())
        }
        ImplicitPolicy::Warn(_) | ImplicitPolicy::Allow => Ok(()),
    }
}

/// Applies a strict policy to an input that an operator is about to redistribute by itself, with or without communication.
pub(crate) fn check_relabelling(
    operator: &'static str,
    from: &Layout,
    to: &Layout,
    rank: usize,
    site: Site,
) -> Result<()> {
    if !rank_context(|context| context.reports_implicit.get()) {
        return Ok(());
    }
    let is_strict = |policy: &mut ImplicitPolicy| matches!(policy, ImplicitPolicy::Strict);
    if !rank_context(|context| context.implicit_redistributions.with(is_strict)) {
        return Ok(());
    }
    let group = from.mesh().ranks().to_vec();
    let call = RankCall { rank, call: "redistribute".to_string(), group, site: user_site(site).to_string() };
    Err(Error::Implicit { operator, moves: moves(&Some((from.clone(), to.clone()))), call: Box::new(call) })
}
