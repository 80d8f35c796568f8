//! The stack of modules whose `forward` is running on this thread.
//!
//! Errors, anomaly reports and traces take paths and lines from it. A rank runs on one thread, so the stack is per rank. Entering and leaving a
//! module costs a push and a pop; nothing is formatted unless something goes wrong.

use std::sync::Arc;

use crate::error::Site;
use crate::rank_context::{EnteredModule, Phase, RankContext, in_scope, rank_context, rank_context_if_alive};

/// Runs `body` as the `forward` of the module at `path`, called at `site`.
pub(crate) fn in_module<R>(path: Option<Arc<str>>, site: Site, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.modules.borrow_mut().push(EnteredModule { path, site });
    in_scope(enter, |context, ()| drop(context.modules.borrow_mut().pop()), body)
}

/// Returns the path of the innermost module that has one.
pub(crate) fn current_path() -> Option<Arc<str>> {
    rank_context(|context| context.modules.borrow().iter().rev().find_map(|entered| entered.path.clone()))
}

/// Runs `body` as a part of a training step.
pub(crate) fn in_phase<R>(phase: Phase, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| context.phase.replace(phase);
    in_scope(enter, |context, before| context.phase.set(before), body)
}

/// The part of a training step that this thread is in.
pub(crate) fn current_phase() -> Phase {
    rank_context(|context| context.phase.get())
}

/// The phase and the module path of this thread, `None` while it is ending: destructors ask.
pub(crate) fn current_place_if_alive() -> Option<(Phase, Option<Arc<str>>)> {
    let path = |context: &RankContext| context.modules.borrow().iter().rev().find_map(|entered| entered.path.clone());
    rank_context_if_alive(|context| (context.phase.get(), path(context)))
}

/// Why the communication of this thread happens, if a reason is known.
pub(crate) fn current_reason() -> Option<Arc<str>> {
    rank_context(|context| context.reason.borrow().clone())
}

/// Runs `body`, whose communication has this reason. The outermost reason counts: it is that of what the program called.
pub(crate) fn with_reason<R>(reason: &Arc<str>, body: impl FnOnce() -> R) -> R {
    let enter = |context: &RankContext| {
        let mut current = context.reason.borrow_mut();
        let is_outermost = current.is_none();
        if is_outermost {
            *current = Some(Arc::clone(reason));
        }
        is_outermost
    };
    let leave = |context: &RankContext, is_outermost: bool| {
        if is_outermost {
            *context.reason.borrow_mut() = None;
        }
    };
    in_scope(enter, leave, body)
}

/// Returns the line of the user's program that an error at `site` should name.
///
/// That is `site` if it is outside this crate, else the innermost line of the user's program that called a module on the
/// way to it (`#[track_caller]` functions that call each other share the line of the outermost), else `site`: a call through
/// `dyn Forward` has no such line.
pub(crate) fn user_site(site: Site) -> Site {
    if !is_inside_crate(site) {
        return site;
    }
    let users = |entered: &EnteredModule| (!is_inside_crate(entered.site)).then_some(entered.site);
    rank_context(|context| context.modules.borrow().iter().rev().find_map(users)).unwrap_or(site)
}

/// Whether a call site is in the sources of this crate, wherever they were compiled.
fn is_inside_crate(site: Site) -> bool {
    site.file().starts_with(SOURCES)
}

/// Prefix of the paths of this crate's sources, as the compiler spells them.
const SOURCES: &str = {
    let own = file!();
    own.split_at(own.len() - "module_scope.rs".len()).0
};

#[cfg(test)]
mod tests {
    use std::panic::{Location, catch_unwind};

    use super::*;

    #[test]
    fn the_innermost_known_path_counts_and_a_panic_leaves_the_module() {
        let site = Location::caller();
        assert_eq!(current_path(), None);
        in_module(Some("blocks.0".into()), site, || {
            in_module(None, site, || assert_eq!(current_path().as_deref(), Some("blocks.0")));
            in_module(Some("blocks.0.up".into()), site, || {
                assert_eq!(current_path().as_deref(), Some("blocks.0.up"));
            });
            let _ = catch_unwind(|| in_module(Some("lost".into()), site, || panic!("on purpose")));
            assert_eq!(current_path().as_deref(), Some("blocks.0"));
        });
        assert_eq!(current_path(), None);
    }

    #[test]
    fn call_sites_inside_the_crate_are_recognized() {
        assert!(is_inside_crate(Location::caller()), "{} does not begin with {SOURCES}", file!());
    }
}
