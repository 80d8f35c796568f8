//! Evaluation mode for a time.

use std::sync::atomic::Ordering::Relaxed;

use super::module::{Module, ModuleItem, TrainingMode};

/// Lets a model compute in evaluation mode as long as this exists. Then every module inside is in the mode in which it was found,
/// or to which it was set meanwhile; also after an error.
pub(crate) struct EvaluationScope(Vec<TrainingMode>);

impl EvaluationScope {
    pub(crate) fn new(model: &(impl Module + ?Sized)) -> Self {
        let mut modes = Vec::new();
        model.walk("", &mut |_, item| {
            if let ModuleItem::TrainingMode(mode) = item {
                mode.0.evaluations.fetch_add(1, Relaxed);
                modes.push(mode.clone());
            }
        });
        EvaluationScope(modes)
    }
}

impl Drop for EvaluationScope {
    fn drop(&mut self) {
        for mode in &self.0 {
            mode.0.evaluations.fetch_sub(1, Relaxed);
        }
    }
}
