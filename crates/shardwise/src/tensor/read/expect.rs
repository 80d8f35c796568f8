//! `DTensor::expect`: assertions about layouts in the middle of a program.

use std::panic::Location;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::error::{Error, ErrorKind, Result};
use crate::module_scope::user_site;
use crate::placement::Placement;
use crate::tensor::DTensor;

static CHECKED: AtomicBool = AtomicBool::new(true);

/// Enables or disables [`DTensor::expect`] for all ranks of this process. It is enabled by default.
pub fn check_expectations(on: bool) {
    CHECKED.store(on, Relaxed);
}

impl DTensor {
    /// Asserts the placements of this tensor and returns it: `dp=S(0),tp=R` by names of mesh axes, or `S(0), R` by their order.
    /// Axes that the text does not name may have any placement.
    ///
    /// Local. Disabled with [`check_expectations`], it costs one clone of the handle.
    ///
    /// ```
    /// # use shardwise::prelude::*;
    /// launch(4, |world| {
    ///     let mesh = world.mesh([("dp", 2), ("tp", 2)])?;
    ///     let x = DTensor::zeros((4, 6), DType::F32, &mesh, [Shard(0), Shard(1)])?.expect("dp=S(0),tp=S(-1)")?;
    ///     let error = x.expect("tp=R").unwrap_err().to_string();
    ///     assert!(error.contains("tp=S(1)") && error.contains("tp=R"), "{error}");
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if a placement differs, or the text cannot be parsed.
    #[track_caller]
    pub fn expect(&self, layout: &str) -> Result<DTensor> {
        if CHECKED.load(Relaxed) {
            let site = user_site(Location::caller());
            let axes: Vec<&str> = self.layout().mesh().axes().iter().map(|axis| &*axis.name).collect();
            for (position, item) in split(layout).into_iter().enumerate() {
                let bad = |fix: &str| {
                    let needed = format!("placements of the axes {axes:?}, such as {}=R", axes[0]);
                    ErrorKind::Layout.error::<Error>("expected layout", format!("`{layout}` at {site}"), needed, fix)
                };
                let (axis, text) = match item.split_once('=') {
                    Some((name, text)) => (axes.iter().position(|axis| *axis == name.trim()), text.trim()),
                    None => (Some(position).filter(|p| *p < axes.len()), item.trim()),
                };
                let axis = axis.ok_or_else(|| bad("correct the names of the axes"))?;
                let expected = text.parse::<Placement>()?.normalized(self.ndim())?;
                let found = &self.placements()[axis];
                if *found != expected {
                    return Err(ErrorKind::Layout.error(
                        "layout",
                        format!("{}={found} of {} at {site}", axes[axis], self.layout()),
                        format!("{}={expected}", axes[axis]),
                        "redistribute the tensor before, or correct the expectation",
                    ));
                }
            }
        }
        Ok(self.clone())
    }
}

/// Splits a list at commas outside of parentheses.
fn split(text: &str) -> Vec<&str> {
    let (mut items, mut start, mut depth) = (Vec::new(), 0, 0);
    for (i, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                items.push(&text[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    items.push(&text[start..]);
    items.into_iter().map(str::trim).filter(|item| !item.is_empty()).collect()
}
