//! Scopes in which communication that the program does not ask for by name is a warning or an error.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::fmt;
use std::rc::Rc;

use crate::error::{Error, RankCall, Result, Site};
use crate::layout::Layout;
use crate::module_scope::user_site;

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

#[derive(Clone)]
enum Mode {
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

thread_local! {
    static CURRENT: RefCell<Mode> = const { RefCell::new(Mode::Allow) };
    static ACTIVE: Cell<bool> = const { Cell::new(false) };
    /// The redistribution that is being executed, and whether it has been reported.
    static MOVING: RefCell<Option<(Layout, Layout, bool)>> = const { RefCell::new(None) };
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
        /// Leaves the scope also when the body panics.
        struct Leave(Option<Mode>);
        impl Drop for Leave {
            fn drop(&mut self) {
                enter(self.0.take().expect("left once"));
            }
        }
        let _leave = Leave(Some(enter(self.0.clone())));
        body()
    }
}

fn enter(mode: Mode) -> Mode {
    ACTIVE.set(!matches!(mode, Mode::Allow));
    CURRENT.replace(mode)
}

/// Runs `body`, which redistributes a tensor; reports inside name its layouts.
pub(crate) fn while_moving<R>(from: &Layout, to: &Layout, body: impl FnOnce() -> R) -> R {
    if !ACTIVE.get() {
        return body();
    }
    /// Also when the body panics.
    struct Restore(Option<(Layout, Layout, bool)>);
    impl Drop for Restore {
        fn drop(&mut self) {
            MOVING.set(self.0.take());
        }
    }
    let _restore = Restore(MOVING.replace(Some((from.clone(), to.clone(), false))));
    body()
}

/// Reports a collective that an operator is about to make by itself.
pub(super) fn check(
    operator: &'static str,
    call: &'static str,
    rank: usize,
    group: &[usize],
    site: Site,
) -> Result<()> {
    if !ACTIVE.get() {
        return Ok(());
    }
    let (layouts, reported) = MOVING.with_borrow_mut(|moving| match moving {
        Some((from, to, reported)) => (Some((from.clone(), to.clone())), std::mem::replace(reported, true)),
        None => (None, false),
    });
    let call = RankCall { rank, call: call.to_string(), group: group.to_vec(), site: user_site(site).to_string() };
    // Not borrowed while it runs: a report may use tensors.
    match CURRENT.with_borrow(Mode::clone) {
        Mode::Error => Err(Error::Implicit { operator, moves: moves(&layouts), call: Box::new(call) }),
        Mode::Warn(report) if !reported => {
            report(&ImplicitRedistribution { operator, layouts, call });
            Ok(())
        }
        Mode::Warn(_) | Mode::Allow => Ok(()),
    }
}
