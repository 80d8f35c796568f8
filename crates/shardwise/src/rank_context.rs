//! Thread-local context of a rank: the scopes that its program is in, and the caches that it keeps between calls.
//!
//! A rank's program runs on one thread, so the context is thread-local. It is the only thread-local state of the crate: a call
//! depends on nothing but its arguments and this struct.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use candle_core::DType;

use crate::error::Site;

thread_local! {
    static CONTEXT: RankContext = const { RankContext::new() };
}

/// Runs `body` with the context of this rank.
pub(crate) fn rank_context<R>(body: impl FnOnce(&RankContext) -> R) -> R {
    CONTEXT.with(body)
}

/// Like [`rank_context`], for destructors: `None` if the thread is ending and its context has been dropped.
pub(crate) fn rank_context_if_alive<R>(body: impl FnOnce(&RankContext) -> R) -> Option<R> {
    CONTEXT.try_with(body).ok()
}

/// Runs `body` in a scope: `enter` changes the context before it, and `leave` undoes that with the value of `enter`, also if
/// `body` panics.
pub(crate) fn in_scope<S, R>(
    enter: impl FnOnce(&RankContext) -> S,
    leave: impl FnOnce(&RankContext, S),
    body: impl FnOnce() -> R,
) -> R {
    struct Leave<S, L: FnOnce(&RankContext, S)>(Option<(L, S)>);
    impl<S, L: FnOnce(&RankContext, S)> Drop for Leave<S, L> {
        fn drop(&mut self) {
            if let Some((leave, entered)) = self.0.take() {
                rank_context(|context| leave(context, entered));
            }
        }
    }
    let _leave = Leave(Some((leave, rank_context(enter))));
    body()
}

/// The part of a training step that a rank is in: what it communicates and allocates is recorded under it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The forward pass, and all calls outside of a training step.
    #[default]
    Forward,
    /// Inside a backward pass, or while gradients are brought into the layouts of their parameters.
    Backward,
    /// Inside the step of an optimizer.
    Update,
}

impl Phase {
    /// All phases, in the order of a training step.
    pub const ALL: [Phase; 3] = [Phase::Forward, Phase::Backward, Phase::Update];
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Update => "update",
        })
    }
}

/// See the [module](self).
pub(crate) struct RankContext {
    /// The modules whose `forward` is running, the innermost last.
    pub(crate) modules: RefCell<Vec<EnteredModule>>,
    /// The operators that are being executed, the innermost last, and whether each redistributes implicitly.
    pub(crate) operators: RefCell<Vec<(&'static str, bool)>>,
    /// The part of a training step that the rank is in.
    pub(crate) phase: Cell<Phase>,
    /// Why data is being moved, in one sentence.
    pub(crate) reason: RefCell<Option<Arc<str>>>,
    /// The mesh axes of the group whose call is being executed.
    pub(crate) group_axes: RefCell<Option<Arc<str>>>,
    /// The records of active `record_communication` scopes: `comm::trace`.
    pub(crate) recorders: AnyField,
    /// Number of [`recorders`](Self::recorders): a cheap test, because every collective reads it and most programs have none.
    pub(crate) recorder_count: Cell<usize>,
    /// The meshes of active `with_mesh` scopes: `Vec<DeviceMesh>`.
    pub(crate) meshes: AnyField,
    /// The value on whose behalf the rank communicates: `comm::origin`.
    pub(crate) call_origin: AnyField,
    /// Whether implicit redistributions are allowed, warnings or errors: `comm::explicit`.
    pub(crate) implicit_redistributions: AnyField,
    /// Whether [`implicit_redistributions`](Self::implicit_redistributions) is not the default: a cheap flag, because every
    /// collective reads it.
    pub(crate) reports_implicit: Cell<bool>,
    /// The redistribution that is being executed: `comm::explicit`.
    pub(crate) moving: AnyField,
    /// Whether operators are not recorded for a backward pass, as in PyTorch's `no_grad`.
    pub(crate) is_recording_paused: Cell<bool>,
    /// Whether spans are being recorded: a cheap flag, because every operator reads it.
    pub(crate) is_profiling: Cell<bool>,
    /// The spans recorded so far: `comm::profile`.
    pub(crate) profile: AnyField,
    /// Time that the rank has waited for other ranks.
    pub(crate) waited: Cell<Duration>,
    /// Whether the gradient of an operator is being computed.
    pub(crate) is_in_gradient: Cell<bool>,
    /// Tensors that were recorded before the call of this number are constants: `autograd::jvp`.
    pub(crate) constants_before: Cell<u64>,
    /// Whether gradients are recorded as functions of only the gradients that arrive, of which they are linear: `autograd::jvp`.
    pub(crate) is_linearizing: Cell<bool>,
    /// Whether backward passes leave the gradients of sharded leaves as partial sums: `autograd`.
    pub(crate) is_reduction_deferred: Cell<bool>,
    /// The type to which products convert their operands, inside of `autocast`.
    pub(crate) autocast: Cell<Option<DType>>,
    /// Number of active `detect_anomaly` scopes.
    pub(crate) anomaly_scopes: Cell<usize>,
    /// Texts of the calls whose gradients are being computed, the innermost last, for errors.
    pub(crate) backward_calls: RefCell<Vec<String>>,
    /// The rules of active `override_rule` scopes: `op::scope`.
    pub(crate) rules: AnyField,
    /// Number of [`rules`](Self::rules): a cheap test, because every operator reads it and most programs have none.
    pub(crate) rule_count: Cell<usize>,
    /// Names of the operators executed so far, if they are being recorded.
    pub(crate) operator_names: RefCell<Option<BTreeSet<&'static str>>>,
    /// The operators of active `with_sharded_op` scopes: `sharded::operators`.
    pub(crate) sharded_operators: AnyField,
    /// Cache of sharding decisions by operator and input layouts: `op`.
    pub(crate) decisions: AnyField,
    /// Cache of redistribution plans with their groups and calls: `redistribute::execute`.
    pub(crate) redistributions: AnyField,
    /// Tables of angles of rotary position embedding: `ops::attention`.
    pub(crate) rotary_tables: AnyField,
    /// Whether a panic would be caught and become an error: `text::tokenizer`.
    pub(crate) catches_panics: Cell<bool>,
    /// Tensors passed to differentiable local code: `tensor::local_code`.
    pub(crate) local_exits: AnyField,
    /// Gradients of tensors that a recomputed call captured instead of taking them as inputs: `autograd`.
    pub(crate) replayed_gradients: AnyField,
}

/// A module whose `forward` is running.
pub(crate) struct EnteredModule {
    /// Dotted path from the root of the model, if known.
    pub(crate) path: Option<Arc<str>>,
    /// Where `forward` was called.
    pub(crate) site: Site,
}

impl RankContext {
    const fn new() -> Self {
        RankContext {
            modules: RefCell::new(Vec::new()),
            operators: RefCell::new(Vec::new()),
            phase: Cell::new(Phase::Forward),
            reason: RefCell::new(None),
            group_axes: RefCell::new(None),
            recorders: AnyField::new(),
            recorder_count: Cell::new(0),
            meshes: AnyField::new(),
            call_origin: AnyField::new(),
            implicit_redistributions: AnyField::new(),
            reports_implicit: Cell::new(false),
            moving: AnyField::new(),
            is_recording_paused: Cell::new(false),
            is_profiling: Cell::new(false),
            profile: AnyField::new(),
            waited: Cell::new(Duration::ZERO),
            is_in_gradient: Cell::new(false),
            constants_before: Cell::new(0),
            is_linearizing: Cell::new(false),
            is_reduction_deferred: Cell::new(false),
            autocast: Cell::new(None),
            anomaly_scopes: Cell::new(0),
            backward_calls: RefCell::new(Vec::new()),
            rules: AnyField::new(),
            rule_count: Cell::new(0),
            operator_names: RefCell::new(None),
            sharded_operators: AnyField::new(),
            decisions: AnyField::new(),
            redistributions: AnyField::new(),
            rotary_tables: AnyField::new(),
            catches_panics: Cell::new(false),
            local_exits: AnyField::new(),
            replayed_gradients: AnyField::new(),
        }
    }
}

/// A field whose type is defined in a module that this one must not depend on. The type is always the same, and the initial
/// value is its default.
pub(crate) struct AnyField(RefCell<Option<Box<dyn Any>>>);

impl AnyField {
    const fn new() -> Self {
        AnyField(RefCell::new(None))
    }

    /// Runs `body` with the value. `body` must not access the same field again (it panics).
    pub(crate) fn with<T: Default + 'static, R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        let mut held = self.0.borrow_mut();
        let value = held.get_or_insert_with(|| Box::new(T::default()));
        body(value.downcast_mut().expect("a field has one type"))
    }

    /// Replaces the value and returns the previous one.
    pub(crate) fn replace<T: Default + 'static>(&self, value: T) -> T {
        self.with(|held| std::mem::replace(held, value))
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn depth() -> usize {
        rank_context(|context| context.anomaly_scopes.get())
    }

    #[test]
    fn a_scope_is_left_when_its_body_panics() {
        let count =
            |by: isize| move |c: &RankContext| c.anomaly_scopes.set(c.anomaly_scopes.get().saturating_add_signed(by));
        let panicking = || {
            in_scope(
                count(1),
                |context, ()| count(-1)(context),
                || {
                    assert_eq!(depth(), 1);
                    panic!("on purpose")
                },
            )
        };
        catch_unwind(AssertUnwindSafe(panicking)).unwrap_err();
        assert_eq!(depth(), 0);
    }

    #[test]
    fn a_field_begins_as_the_default_of_its_type_and_keeps_what_it_is_given() {
        rank_context(|context| {
            context.meshes.with(|names: &mut Vec<&str>| assert!(names.is_empty()));
            assert!(context.meshes.replace(vec!["dp"]).is_empty());
            context.meshes.with(|names: &mut Vec<&str>| assert_eq!(names, &["dp"]));
        });
    }

    #[test]
    fn every_thread_has_its_own() {
        rank_context(|context| context.is_in_gradient.set(true));
        let other = std::thread::spawn(|| rank_context(|context| context.is_in_gradient.get())).join().unwrap();
        assert!(!other);
    }
}
